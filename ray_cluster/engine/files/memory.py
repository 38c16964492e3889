"""What a model will need, found out before any weight is loaded.

Weights are counted from the headers of the files. Activations are counted by running the real
modules on fake tensors (shapes without data) and following every allocation, so the number holds
for any architecture that the executor covers. That takes seconds: of built-in models the numbers
were written down beforehand.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from math import isqrt, prod
from pathlib import Path
from typing import Any

import diffusers
import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.batch.token_layout import SizeGroup, layout_of
from ray_cluster.engine.files.folders import component_config, denoiser_name, pipeline_name
from ray_cluster.engine.files.known_activations import KnownActivations
from ray_cluster.engine.files.weights import component_weights, is_text_encoder, vae_dtype
from ray_cluster.engine.models.denoisers import (
    build_executor,
    guidance_kind,
    is_unet,
    model_class,
)
from ray_cluster.engine.models.packed_weights import packs
from ray_cluster.engine.models.wide_layers import computing_dtype, widen
from ray_cluster.engine.stages.autoencoder import decode_batch, in_decoders_format
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.models.local import (
    MAX_REFERENCES,
    max_reference_px,
    patch_size,
    vae_scale_factor,
)
from ray_cluster.policies.costs.gpu_shares import CUDA_CONTEXT_BYTES, Card, replica_bytes
from ray_cluster.policies.costs.memory import (
    ActivationCost,
    MemoryNeed,
    MemoryPlan,
    SizePx,
    plan_memory,
)

_CPU = torch.device("cpu")
_TOKENS = 77
# to which the pipelines fill up every prompt: SD3's of CLIP and T5, FLUX's of T5
_TRANSFORMER_TOKENS = {"SD3Transformer2DModel": _TOKENS + 256, "FluxTransformer2DModel": 512}
# of what is free; the rest is for the allocator's slack and the other processes
_USABLE_SHARE = 0.85
# of a convolution, that oneDNN computes at a time with AVX2
_OUTPUTS = 24
_KEPT_COUNTS = 256


class PeakBytes(TorchDispatchMode):
    """Follows the live bytes of all tensors made while it is active.

    Args:
        copies_weights: whether convolutions copy their weights into oneDNN's layout in every call.

    Attributes:
        peak: most bytes alive at once.
    """

    def __init__(self, *, copies_weights: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._copies_weights = copies_weights
        self._alive = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages it returns that are new."""
        result = func(*args, **(kwargs or {}))
        # what it returns of what it was given, such as views of weights, is not new
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._count(storage)
        if "conv" in str(func):
            copied = _copied_bytes(args[0], args[1] if self._copies_weights else None)
            self.peak = max(self.peak, self._alive + copied)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._alive -= size


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copied_bytes(images: Tensor, weight: Tensor | None) -> int:
    """Return what a convolution copies into layouts of its own, and keeps while it runs.

    Args:
        weight: ``[D, C, h, w]``; None if it is not copied.
    """
    is_channels_last = images.is_contiguous(memory_format=torch.channels_last)
    copied = 0 if is_channels_last else images.nbytes
    if weight is not None and max(weight.shape[2:]) > 1:
        num_outputs = len(weight)
        # filled up to whole registers: what AVX2 takes, and a little more than other CPUs do
        copied += weight.nbytes // num_outputs * (-(-num_outputs // _OUTPUTS) * _OUTPUTS)
    return copied


def step_bytes(
    config: dict[str, Any],
    latent_hw: tuple[int, int],
    rows: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    references: tuple[tuple[int, int], ...] = (),
) -> int:
    """Return the peak bytes of one step with ``rows`` model rows of a latent size.

    Args:
        dtype: of the weights; this CPU may compute in another (``wide_layers.py``).
        device: of one that is no CPU, what its libraries copy is not counted.
        references: latent sizes of what each row looks at.
    """
    copies, config_json = _copies_weights(dtype, device), json.dumps(config, sort_keys=True)
    return _step_bytes(config_json, latent_hw, rows, dtype, references, copies=copies)


def _copies_weights(dtype: torch.dtype, device: torch.device) -> bool:
    # packed weights are in the layout already
    return device.type == "cpu" and not packs(dtype)


# seconds of work that pools of the same model, and a check before a load, share
@lru_cache(maxsize=_KEPT_COUNTS)
def _step_bytes(
    config_json: str,
    latent_hw: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    references: tuple[tuple[int, int], ...],
    *,
    copies: bool,
) -> int:
    config = json.loads(config_json)
    with _fake(copies=copies) as peak:
        with _making(dtype):
            model = model_class(config).from_config(config)
            conditioning = _fake_conditioning(config)
        executor = build_executor(model, vae_scale_factor=1, device=_CPU)
        seen = tuple(torch.zeros(executor.latent_shape(*size)) for size in references)
        conditioning = replace(conditioning, references=seen)
        with peak:
            batch = StepBatch(
                layout=layout_of((SizeGroup(*latent_hw, 0, rows),), executor.num_levels),
                latents=torch.zeros(
                    rows * latent_hw[0] * latent_hw[1],
                    executor.latent_shape(*latent_hw)[0] + executor.num_conditions,
                ),
                timesteps=torch.zeros(rows),
                prepared=tuple(executor.prepare(conditioning) for _ in range(rows)),
                guidance_scales=torch.ones(rows),
            )
            executor.decode_half(executor.encode_half(batch))
    return peak.peak


def decode_bytes(
    config: dict[str, Any],
    latent_hw: tuple[int, int],
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the peak bytes of decoding one image of a latent size in a number format."""
    return _coding_bytes(config, latent_hw, device, dtype, encodes=False)


def encode_bytes(
    config: dict[str, Any],
    latent_hw: tuple[int, int],
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the peak bytes of encoding one image of a latent size in a number format."""
    return _coding_bytes(config, latent_hw, device, dtype, encodes=True)


def _coding_bytes(
    config: dict[str, Any],
    latent_hw: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    encodes: bool,
) -> int:
    # where activations are in float32 the weights' own format is followed; else they scale with it
    is_wide = computing_dtype(dtype, device) is not dtype
    followed = dtype if is_wide else torch.float32
    share = 1.0 if is_wide else dtype.itemsize / followed.itemsize
    config_json = json.dumps(config, sort_keys=True)
    return int(share * _coding(config_json, latent_hw, device, followed, encodes=encodes))


@lru_cache(maxsize=_KEPT_COUNTS)
def _coding(
    config_json: str,
    latent_hw: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    encodes: bool,
) -> int:
    config = json.loads(config_json)
    with _fake(copies=device.type == "cpu") as peak:
        with _making(dtype):
            vae = getattr(diffusers, config["_class_name"]).from_config(config)
        widen(in_decoders_format(vae, device), device)
        factor = vae_scale_factor(config)
        image = torch.zeros(1, 3, *(side * factor for side in latent_hw))
        latents = torch.zeros(1, config["latent_channels"], *latent_hw)
        with peak:
            if encodes:
                vae.encode(image, return_dict=False)
            else:
                vae.decode(latents, return_dict=False)
    return peak.peak


@contextmanager
def _fake(*, copies: bool) -> Iterator[PeakBytes]:
    with FakeTensorMode(), torch.inference_mode():
        yield PeakBytes(copies_weights=copies)


@contextmanager
def _making(dtype: torch.dtype) -> Iterator[None]:
    """Make what is made within in a dtype: fake weights cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fake_conditioning(config: dict[str, Any]) -> Conditioning:
    if not is_unet(config):
        num_tokens = _TRANSFORMER_TOKENS[config["_class_name"]]
        return Conditioning(
            torch.zeros(num_tokens, config["joint_attention_dim"]),
            pooled_embeds=torch.zeros(config["pooled_projection_dim"]),
        )
    width = config["cross_attention_dim"]
    width = max(width) if isinstance(width, list | tuple) else width
    pooled = ids = None
    if config.get("addition_embed_type") == "text_time":
        time_width = 6 * config["addition_time_embed_dim"]
        pooled = torch.zeros(config["projection_class_embeddings_input_dim"] - time_width)
        ids = torch.zeros(6)
    prompt = torch.zeros(_TOKENS, config.get("encoder_hid_dim") or width)
    return Conditioning(prompt, pooled_embeds=pooled, time_ids=ids)


def model_need(
    folder: Path,
    sizes: Sequence[SizePx],
    dtype: torch.dtype,
    max_batch: int,
    device: torch.device = _CPU,
    known: KnownActivations | None = None,
) -> MemoryNeed:
    """Return what a model needs for images of each size, from its files alone.

    A step is counted with guidance (two model rows a request, if the model is guided by these),
    beside the decoding of the images that may be decoded together meanwhile, or the encoding of
    as many for edits: they take turns.
    """
    model, vae = (component_config(folder, name) for name in (denoiser_name(folder), "vae"))
    per_request = 2 if guidance_kind(model) == "rows" else 1
    factor = vae_scale_factor(vae)
    seen = _references(folder, max(width * height for width, height in sizes), factor)
    # on a CPU norms and attention of half precision are computed in float32, and where it has no
    # instructions for it all layers; elsewhere activations scale with the width of the numbers they
    # are made of
    followed = dtype if device.type == "cpu" else torch.float32
    share, of_vae = dtype.itemsize / followed.itemsize, vae_dtype(vae, dtype)
    known = KnownActivations.of(folder) if known is None else known
    way = "copied" if _copies_weights(followed, device) else "packed"
    activation = {}
    for size in sizes:
        latent_hw = (size[1] // factor, size[0] // factor)
        one, two = (
            share
            * known.found(
                f"step of {rows}, {way}" + f", looks at {seen}" * bool(seen),
                model,
                latent_hw,
                followed,
                partial(step_bytes, model, latent_hw, rows, followed, device, seen),
            )
            for rows in (per_request, 2 * per_request)
        )
        together = decode_batch(latent_hw[0] * latent_hw[1], max_batch, device)
        largest = max((latent_hw, *seen), key=prod)
        coding = _larger_coding(known, vae, largest, device, of_vae)
        activation[size] = ActivationCost(
            fixed_bytes=int(max(0, 2 * one - two) + together * coding),
            per_row_bytes=int(two - one),
        )
    weights = component_weights(folder, dtype)
    encoders = [weights.pop(name) for name in sorted(weights) if is_text_encoder(name)]
    # one after the other; the other stages run beside them
    encoder_layer = max((one.layer_bytes for one in encoders), default=0)
    encoder_bytes = sum(one.num_bytes for one in encoders)
    others = weights.values()
    return MemoryNeed(
        weights_bytes=encoder_bytes + sum(one.num_bytes for one in others),
        activation_by_size=activation,
        encoder_bytes=encoder_bytes - encoder_layer,
        pinned_weights_bytes=encoder_layer + sum(one.layer_bytes for one in others),
        context_bytes=CUDA_CONTEXT_BYTES if device.type == "cuda" else 0,
    )


def _references(folder: Path, most_px: int, factor: int) -> tuple[tuple[int, int], ...]:
    """Return the largest latents of what a model of a folder looks at, in every row of a step."""
    if not (count := MAX_REFERENCES.get(pipeline_name(folder), 0)):
        return ()
    patch = patch_size(component_config(folder, denoiser_name(folder)))
    side = isqrt(max_reference_px(isqrt(most_px))) // (factor * patch) * patch
    return ((side, side),) * count


def _larger_coding(
    known: KnownActivations,
    vae: dict[str, Any],
    latent_hw: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    return max(
        known.found(
            f"{name} on {device.type}",
            vae,
            latent_hw,
            dtype,
            partial(count, vae, latent_hw, device, dtype),
        )
        for name, count in (("decode", decode_bytes), ("encode", encode_bytes))
    )


def plan_model_memory(
    folder: Path,
    pool: PoolConfig,
    sizes: Sequence[SizePx],
    dtype: torch.dtype,
    card: Card | None = None,
) -> MemoryPlan:
    """Decide how a pool's model runs on its device, before any weight is loaded.

    Args:
        card: the GPU; None for a CPU, or for one of which ``memory_gib`` says all.
    """
    return plan_memory(
        model_need(folder, sizes, dtype, pool.step_batch, torch.device(pool.device)),
        budget_bytes=_budget_bytes(pool, card),
        max_batch=pool.step_batch,
        can_offload=pool.device == "cuda" and pool.offload == "auto",
    )


def plan_on_cards(
    folder: Path,
    pool: PoolConfig,
    sizes: Sequence[SizePx],
    dtype: torch.dtype,
    cards: Sequence[Card],
) -> list[MemoryPlan]:
    """Return how a pool's model would run on each of some GPUs, if it had one to itself.

    Args:
        pool: of such GPUs.
    """
    need = model_need(folder, sizes, dtype, pool.step_batch, torch.device("cuda"))
    return [
        plan_memory(
            need,
            budget_bytes=_budget_bytes(pool, card),
            max_batch=pool.step_batch,
            can_offload=pool.offload == "auto",
        )
        for card in cards
    ]


def _budget_bytes(pool: PoolConfig, card: Card | None) -> int:
    """Return the bytes that a replica of the pool may plan with."""
    given = pool.memory_bytes
    if card is None:
        available = psutil.virtual_memory().available
        # ranks of a group share the machine's memory
        return int(available * _USABLE_SHARE / pool.ranks) if given is None else given
    most = min(card.free_bytes, replica_bytes(card, pool.num_gpus, given))
    return int(most * _USABLE_SHARE) if given is None else most
