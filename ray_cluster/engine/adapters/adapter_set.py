"""Several LoRAs with their scales, bound to a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.adapters.low_rank import LowRank, joined, packed
from ray_cluster.engine.deltas import LayerDeltas
from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.prompt_encoder import PromptDeltas


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSet:
    """What a request's LoRAs add to the layers of its model.

    Neighbours in a batch that have the same set share its products.

    Attributes:
        denoiser: None if they leave it as it is.
        prompts: of the text encoders; likewise.
        num_bytes: of all factors.
    """

    denoiser: LayerDeltas | None
    prompts: PromptDeltas | None
    num_bytes: int


def bind_adapters(model: LoadedModel, loras: Sequence[tuple[LoraFactors, float]]) -> AdapterSet:
    """Return the set of some LoRAs with their scales, on the model's device.

    Raises:
        ModelUnsupported: one of them changes a layer that the model has not.
    """
    executor = model.executor
    by_component = {
        component: packed(
            {path: one.to(executor.device, executor.dtype) for path, one in layers.items()}
        )
        for component, layers in _joined(loras).items()
    }
    num_bytes = sum(one.num_bytes for part in by_component.values() for one in part.values())
    prompts = {name: by_component.pop(name) for name in list(by_component) if "text" in name}
    [denoiser] = by_component.values() or [{}]
    return AdapterSet(
        executor.bind(denoiser) if denoiser else None,
        model.encoder.bind(prompts) if prompts else None,
        num_bytes,
    )


def _joined(loras: Sequence[tuple[LoraFactors, float]]) -> dict[str, dict[str, LowRank]]:
    """Return one product for each layer, by component and path."""
    several: dict[str, dict[str, list[LowRank]]] = {}
    for factors, scale in loras:
        for component, layers in factors.by_component.items():
            found = several.setdefault(component, {})
            for path, one in layers.items():
                found.setdefault(path, []).append(one if scale == 1 else one.scaled(scale))
    return {
        component: {path: joined(ones) for path, ones in layers.items()}
        for component, layers in several.items()
    }
