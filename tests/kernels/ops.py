"""Both implementations of every op, called among poisoned memory, and what they are held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
DTYPES = (torch.float32, torch.float16)
CONTROL_FACTOR = 100
# elements of NaN before and behind every tensor: no more than alignment needs
_GUARD = 64


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of the ops: ``reference``, or ``triton`` on a GPU or interpreted."""

    kind: str
    device: str

    def __call__(self, op: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of an op; all it reads and writes stands between guards of NaN.

        What it allocates is NaN at first, so an element that it does not write is seen.
        """
        function = self.function(op, name)
        with _poisoned() as buffers:
            args, kwargs = self._placed(args), {key: self._placed(x) for key, x in kwargs.items()}
            found = function(*args, **kwargs)
        for buffer in buffers:
            poison = torch.full_like(buffer, _poison(buffer.dtype))
            for part in (slice(_GUARD), slice(-_GUARD, None)):
                guard, expected = (one[part].cpu() for one in (buffer, poison))
                assert torch.equal(guard.nan_to_num(7.0), expected.nan_to_num(7.0)), part
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        for result in found if isinstance(found, tuple) else [found]:
            assert result.is_contiguous() or result.untyped_storage().data_ptr() in given
        return found

    def function(self, op: str, name: str) -> Any:
        """Return a function of an op as it is."""
        return getattr(import_module(f"ray_cluster.kernels.{op}.{self.kind}"), name)

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return guarded(value.to(self.device))
        if isinstance(value, tuple):
            parts = [self._placed(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value


def guarded(value: Tensor) -> Tensor:
    """A copy between NaN (or what is no row's number), so that reading beyond it is seen."""
    if value.dtype == torch.bool:
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)


def _buffer(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    size = math.prod(shape)
    whole = torch.full((size + 2 * _GUARD,), _poison(dtype), dtype=dtype, device=device)
    return whole, whole[_GUARD : _GUARD + size].view(shape)


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


@contextmanager
def _poisoned() -> Iterator[list[Tensor]]:
    buffers: list[Tensor] = []

    def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        whole, inside = _buffer(shape, dtype, device)
        buffers.append(whole)
        return inside

    def empty_like(other: Tensor) -> Tensor:
        return empty(other.shape, dtype=other.dtype, device=other.device)

    with patch("torch.empty", empty), patch("torch.empty_like", empty_like):
        yield buffers


def offsets_of(sizes: Sequence[int]) -> Tensor:
    """Where images of these sizes begin, and where the last one ends."""
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def per_image(function: Callable[[Tensor], Tensor], x: Tensor, offsets: Tensor) -> Tensor:
    """Apply a function of ``[1, C, n]`` in float64 to the rows of each image alone."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for begin, end in pairwise(offsets.tolist()):
        if end > begin:
            out[begin:end] = function(x[begin:end].double().T[None])[0].T
    return out


def group_norm(x: Tensor, offsets: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's group normalisation of each image alone, in float64."""

    def norm(image: Tensor) -> Tensor:
        if image.shape[2] * image.shape[1] == groups:
            # torch refuses to normalise one value; its deviation from its mean is zero
            return bias.double().view(1, -1, 1).expand_as(image)
        return F.group_norm(image, groups, weight.double(), bias.double(), EPS)

    return per_image(norm, x, offsets)


def gap(found: Tensor, truth: Tensor) -> float:
    """The largest difference, of large values relative to them; infinite for a NaN."""
    if not truth.numel():
        return 0.0
    worst = ((found.cpu().double() - truth).abs() / truth.abs().clamp(min=1.0)).max()
    return math.inf if worst.isnan() else float(worst)


def tolerance(dtype: torch.dtype) -> float:
    """What :func:`gap` may be: a few roundings of fp32, or one of fp16 (half a unit) and those."""
    return 5e-6 if dtype == torch.float32 else 2.0**-11 + 5e-6
