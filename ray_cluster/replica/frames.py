"""Tensors as the frames of messages, byte for byte, in whatever format they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_cluster.protocol.controlnets import FrameSpec
from ray_cluster.transport.links import Bytes

_FORMATS = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Framed:
    """Tensors as frames, and how these are read."""

    specs: tuple[FrameSpec, ...]
    frames: tuple[Bytes, ...]


def framed(tensors: Mapping[str, Tensor]) -> Framed:
    """Return tensors as frames; those on the CPU are not copied if they are contiguous."""
    flat = [one.detach().cpu().contiguous().flatten() for one in tensors.values()]
    return Framed(
        tuple(
            FrameSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for name, one in tensors.items()
        ),
        tuple(one.view(torch.uint8).numpy() for one in flat),
    )


def tensors_of(specs: Sequence[FrameSpec], frames: Sequence[Bytes]) -> dict[str, Tensor]:
    """Return copies of frames as tensors by name, which outlive the message.

    Raises:
        ValueError: they are not what the specs say.
    """
    if len(specs) != len(frames):
        raise ValueError(f"{len(frames)} frames, {len(specs)} are named")
    return {spec.name: _tensor(spec, frame) for spec, frame in zip(specs, frames, strict=True)}


def _tensor(spec: FrameSpec, frame: Bytes) -> Tensor:
    if spec.dtype not in _FORMATS or any(size < 0 for size in spec.shape):
        raise ValueError(f"frame {spec.name} is {spec}; formats are {', '.join(_FORMATS)}")
    dtype, count = _FORMATS[spec.dtype], 1
    for size in spec.shape:
        count *= size
    if count * dtype.itemsize != frame.nbytes:
        raise ValueError(f"frame {spec.name} has {frame.nbytes} bytes and is to be {spec}")
    tensor = torch.empty(count, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = frame
    return tensor.view(spec.shape)
