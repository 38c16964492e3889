"""From diffusers' UNet to the lean parts, block by block; what is not covered is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from ray_cluster.engine.models.packed_weights import Layer, packed_linear
from ray_cluster.engine.unet.parts import (
    Convolve,
    Downsample,
    LastNorm,
    Resnet,
    Transformer,
    Upsample,
)
from ray_cluster.errors import ModelUnsupported

_BLOCKS = (
    "DownBlock2D",
    "CrossAttnDownBlock2D",
    "UNetMidBlock2D",
    "UNetMidBlock2DCrossAttn",
    "UpBlock2D",
    "CrossAttnUpBlock2D",
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A resnet and, in blocks with cross-attention, the transformer after it."""

    resnet: Resnet
    transformer: Transformer | None


@dataclass(frozen=True, slots=True)
class DownBlock:
    """One block of the encoder half."""

    pairs: tuple[Pair, ...]
    downsample: Downsample | None


@dataclass(frozen=True, slots=True)
class UpBlock:
    """One block of the decoder half; every resnet takes one skip connection more."""

    pairs: tuple[Pair, ...]
    upsample: Upsample | None


@dataclass(frozen=True)
class LeanEncoder:
    """The parts of an encoder half, and the layers that prepare what all parts are conditioned on.

    Attributes:
        time: from the activated time embedding ``[R, E]`` to ``[R, S]``, every resnet's own.
        prompts: from the prompt's embedding ``[T, D]`` to ``[T, P]``, every cross-attention's keys
            and values; None for a model without any.
    """

    first: Convolve
    down: tuple[DownBlock, ...]
    middle: tuple[Pair, ...]
    time: Layer
    prompts: Layer | None

    @cached_property
    def inwards(self) -> tuple[tuple[Pair | Downsample, int], ...]:
        """What makes the skip connections but the first, outermost first, each with its level."""
        found: list[tuple[Pair | Downsample, int]] = []
        level = 0
        for block in self.down:
            found += [(pair, level) for pair in block.pairs]
            if block.downsample is not None:
                found.append((block.downsample, level))
                level += 1
        return tuple(found)

    @cached_property
    def skip_levels(self) -> tuple[int, ...]:
        """The levels of the skip connections, outermost first."""
        made = ((level + isinstance(part, Downsample)) for part, level in self.inwards)
        return (0, *made)

    @property
    def num_levels(self) -> int:
        """Resolutions that it works at."""
        return 1 + sum(block.downsample is not None for block in self.down)


@dataclass(frozen=True)
class LeanUNet(LeanEncoder):
    """All parts of a UNet."""

    up: tuple[UpBlock, ...]
    last_norm: LastNorm | None
    last: Convolve

    @cached_property
    def outwards(self) -> tuple[tuple[Pair, Upsample | None, int], ...]:
        """What takes them, innermost first, with what follows it and its level."""
        found: list[tuple[Pair, Upsample | None, int]] = []
        level = self.num_levels - 1
        for block in self.up:
            found += [(pair, None, level) for pair in block.pairs[:-1]]
            found.append((block.pairs[-1], block.upsample, level))
            level -= block.upsample is not None
        return tuple(found)


def build_lean(unet: Any) -> LeanUNet:
    """Build the lean parts of a diffusers ``UNet2DConditionModel``, whose weights they take over.

    Raises:
        ModelUnsupported: a block, or a layer in it, is not covered.
    """
    builder = _checked(unet, unet.up_blocks)
    up = tuple(
        UpBlock(builder.pairs(block), builder.sampler(block, "upsamplers", Upsample))
        for block in unet.up_blocks
    )
    inner = builder.encoder()
    return LeanUNet(
        first=inner.first,
        down=inner.down,
        middle=inner.middle,
        up=up,
        last_norm=None if unet.conv_norm_out is None else LastNorm(unet.conv_norm_out),
        last=Convolve(unet.conv_out),
        time=inner.time,
        prompts=inner.prompts,
    )


def build_lean_encoder(model: Any) -> LeanEncoder:
    """Build the lean parts of a diffusers ``ControlNetModel``'s blocks, likewise."""
    return _checked(model, ()).encoder()


def prompt_layers(unet: Any) -> frozenset[nn.Module]:
    """Return the layers that run once for each prompt: keys and values, added embeddings."""
    attentions = [part.attn2 for part in unet.modules() if _is(part, "BasicTransformerBlock")]
    found = [layer for one in attentions for layer in (one.to_k, one.to_v)]
    for name in ("add_embedding", "encoder_hid_proj"):
        if (part := getattr(unet, name, None)) is not None:
            found += part.modules()
    return frozenset(found)


def _checked(model: Any, up_blocks: Iterable[Any]) -> _Builder:
    middle = () if model.mid_block is None else (model.mid_block,)
    for block in (*model.down_blocks, *up_blocks, *middle):
        _check_block(block)
    return _Builder(model)


class _Builder:
    """Gives every resnet and every cross-attention its part of the joint projections."""

    def __init__(self, unet: Any) -> None:
        self._unet = unet
        resnets = [part for part in unet.modules() if _is(part, "ResnetBlock2D")]
        attentions = [part.attn2 for part in unet.modules() if _is(part, "BasicTransformerBlock")]
        self._times = _slices(resnets, [one.time_emb_proj.out_features for one in resnets])
        self._prompts = _slices(attentions, [2 * one.to_k.out_features for one in attentions])
        self.time = packed_linear(*(one.time_emb_proj for one in resnets))
        keys_values = [layer for one in attentions for layer in (one.to_k, one.to_v)]
        self.prompts = packed_linear(*keys_values) if keys_values else None

    def encoder(self) -> LeanEncoder:
        unet = self._unet
        return LeanEncoder(
            first=Convolve(unet.conv_in),
            down=tuple(
                DownBlock(self.pairs(block), self.sampler(block, "downsamplers", Downsample))
                for block in unet.down_blocks
            ),
            middle=() if unet.mid_block is None else self.middle(unet.mid_block),
            time=self.time,
            prompts=self.prompts,
        )

    def pairs(self, block: Any) -> tuple[Pair, ...]:
        attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
        return tuple(self._pair(*pair) for pair in zip(block.resnets, attentions, strict=True))

    def middle(self, block: Any) -> tuple[Pair, ...]:
        """A resnet, then transformers and resnets in turns: the last resnet has none after it.

        Without cross-attention (SSD-1B) the first resnet is all.
        """
        attentions = [*block.attentions, None][: len(block.resnets)]
        return tuple(self._pair(*pair) for pair in zip(block.resnets, attentions, strict=True))

    def _pair(self, resnet: Any, transformer: Any | None) -> Pair:
        lean = Resnet(resnet, self._times[id(resnet)])
        if transformer is None:
            return Pair(lean, None)
        prompts = [self._prompts[id(layer.attn2)] for layer in transformer.transformer_blocks]
        return Pair(lean, Transformer(transformer, prompts))

    def sampler(self, block: Any, name: str, kind: type[Any]) -> Any | None:
        samplers = getattr(block, name, None)
        return kind(samplers[0]) if samplers else None


def _slices(parts: list[Any], widths: list[int]) -> dict[int, slice]:
    spans = pairwise(accumulate(widths, initial=0))
    return {id(part): slice(*span) for part, span in zip(parts, spans, strict=True)}


def _is(part: nn.Module, name: str) -> bool:
    return type(part).__name__ == name


def _check_block(block: nn.Module) -> None:
    if type(block).__name__ not in _BLOCKS:
        raise ModelUnsupported(
            f"unet block {type(block).__name__} is not covered; allowed: {_BLOCKS}"
        )
    for name, problem in _problems(block):
        raise ModelUnsupported(f"unet block {type(block).__name__}: {name} {problem}")


def _problems(block: nn.Module) -> Iterator[tuple[str, str]]:
    """Find layers that compute something else than the lean parts would."""
    for name, part in block.named_modules():
        for key, allowed in _ALLOWED.get(type(part).__name__, {}).items():
            given = getattr(part, key)
            if given not in allowed:
                yield name, f"has {key}={given!r}; allowed: {allowed}"


_ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "ResnetBlock2D": {
        "up": (False,),
        "down": (False,),
        "time_embedding_norm": ("default",),
        "skip_time_act": (False,),
        "output_scale_factor": (1.0,),
    },
    "Transformer2DModel": {"is_input_continuous": (True,)},
    "BasicTransformerBlock": {
        "norm_type": ("layer_norm",),
        "only_cross_attention": (False,),
        "pos_embed": (None,),
    },
    "Attention": {
        "group_norm": (None,),
        "spatial_norm": (None,),
        "norm_cross": (None,),
        "norm_q": (None,),
        "norm_k": (None,),
        "residual_connection": (False,),
        "rescale_output_factor": (1.0,),
    },
    "Downsample2D": {"use_conv": (True,), "norm": (None,)},
    "Upsample2D": {
        "use_conv": (True,),
        "use_conv_transpose": (False,),
        "interpolate": (True,),
        "norm": (None,),
    },
}
