"""Several LoRAs with their scales, bound to a loaded model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.adapters.low_rank import LowRank, joined, packed
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.prompt_encoder import PromptDeltas


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSet:
    """What a request's LoRAs add to the layers of its model.

    Neighbours in a batch that have the same set share its products.

    Attributes:
        denoiser: None if they leave it as it is.
        prompts: of the text encoders; likewise.
        layers: what both are made of.
    """

    denoiser: LayerDeltas | None
    prompts: PromptDeltas | None
    layers: tuple[LowRank, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all factors."""
        return sum(one.num_bytes for one in self.layers)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all factors."""
        for one in self.layers:
            yield from (one.shrink, one.expand)


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
    layers = tuple(one for part in by_component.values() for one in part.values())
    prompts = {name: by_component.pop(name) for name in list(by_component) if "text" in name}
    [denoiser] = by_component.values() or [{}]
    return AdapterSet(
        executor.bind(denoiser) if denoiser else None,
        model.encoder.bind(prompts) if prompts else None,
        layers,
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
