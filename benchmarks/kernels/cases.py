"""What each op is given, what it is compared with, and how many bytes it cannot but move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import naive
from ray_cluster.kernels.grouped_low_rank.reference import RowGroups

_EPS = 1e-5
_NUM_COEFFICIENTS = 8
_LATENT_CHANNELS = 4
_NUM_GROUPS, _RANK = 8, 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """The matrix that the ops work on.

    Attributes:
        sides: of the images, in latent pixels.
        patch: side of a patch in latent pixels; it divides every side.
    """

    sides: tuple[int, ...]
    channels: int
    groups: int
    patch: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one input.

    Attributes:
        op: the folder in ``kernels/``, and the name of its function.
        shape: of the input and the result, for people.
        num_bytes: read and written if each byte is touched once.
        naive: what one would write without the op.
        call: gives an implementation of the op the same input.
    """

    op: str
    shape: str
    num_bytes: int
    naive: Callable[[], Any]
    call: Callable[[Callable[..., Any]], Any]


def cpu_sizes() -> Sizes:
    """Return eight images of 64, 96 and 128 px in the first level of a small model."""
    return Sizes((8, 8, 8, 12, 12, 12, 16, 16), 32, 8, 4, torch.float32, "cpu")


def gpu_sizes(dtype: torch.dtype = torch.float16) -> Sizes:
    """Return eight images of 512, 768 and 1024 px in the first level of SDXL."""
    sides = (64, 64, 64, 96, 96, 96, 128, 128)
    return Sizes(sides, 320, 32, 32, dtype, "cuda")


def cases_of(sizes: Sizes) -> list[Case]:
    """Return a case of every op."""
    rows = [side * side for side in sizes.sides]
    offsets = torch.tensor([0, *rows]).cumsum(0).int().to(sizes.device)
    x = _random(sizes, sum(rows), sizes.channels)
    return [
        *_norms(sizes, x, offsets, rows),
        _geglu(sizes, x),
        *_moves(sizes, x, rows),
        _low_rank(sizes, x),
        _sampler(sizes, rows),
    ]


def _norms(sizes: Sizes, x: Tensor, offsets: Tensor, rows: Sequence[int]) -> list[Case]:
    weight, bias = _random(sizes, 2, sizes.channels)
    norm = (x, offsets, sizes.groups, weight, bias, _EPS)
    plain = (x, rows, sizes.groups, weight, bias, _EPS)
    shape = f"{_shape(x)}, {len(rows)} images"
    return [
        Case(
            "group_norm_silu",
            shape,
            2 * x.nbytes,
            lambda: naive.group_norm_silu(*plain),
            lambda function: function(*norm, silu=True),
        ),
        Case(
            "segment_stats",
            shape,
            x.nbytes,
            lambda: naive.segment_stats(x, rows, sizes.groups, _EPS),
            lambda function: function(x, offsets, sizes.groups, _EPS),
        ),
    ]


def _geglu(sizes: Sizes, x: Tensor) -> Case:
    wide = _random(sizes, len(x), 4 * sizes.channels)
    return Case(
        "geglu",
        f"a copy of {_shape(wide)}",
        # it overwrites what it is given: all are given a copy, which is read and written
        wide.nbytes * 7 // 2,
        lambda: naive.geglu(wide.clone()),
        lambda function: function(wide.clone()),
    )


def _moves(sizes: Sizes, x: Tensor, rows: Sequence[int]) -> list[Case]:
    """Every second patch is packed, and put back."""
    patch = sizes.patch**2
    is_taken = torch.arange(sum(rows) // patch, device=sizes.device) % 2 == 0
    mask = is_taken.repeat_interleave(patch)
    index = mask.nonzero().flatten().int()
    packed = _random(sizes, len(index), sizes.channels)
    return [
        Case(
            "row_gather",
            f"{_shape(packed)} of {_shape(x)}",
            2 * packed.nbytes,
            lambda: x[mask],
            lambda function: function(x, index),
        ),
        Case(
            "row_scatter",
            f"{_shape(packed)} into a copy of {_shape(x)}",
            2 * x.nbytes + 2 * packed.nbytes,
            lambda: naive.row_scatter(x, packed, mask),
            lambda function: function(x, packed, index),
        ),
    ]


def _low_rank(sizes: Sizes, x: Tensor) -> Case:
    """A product for each of eight groups of rows, as of LoRAs of a layer as wide as the matrix."""
    groups = RowGroups(0, len(x) // _NUM_GROUPS, len(x) // _NUM_GROUPS)
    shrink, expand = (
        _random(sizes, _NUM_GROUPS, _RANK, sizes.channels) / sizes.channels for _ in range(2)
    )
    inputs = _random(sizes, *x.shape)
    given = (inputs, shrink, expand, groups)
    return Case(
        "grouped_low_rank",
        f"{_shape(x)}, {_NUM_GROUPS} groups, rank {_RANK}",
        # a copy is read and written, changed in place, and the inputs are read
        5 * x.nbytes + shrink.nbytes + expand.nbytes,
        lambda: naive.grouped_low_rank(x.clone(), *given),
        lambda function: function(x.clone(), *given),
    )


def _sampler(sizes: Sizes, rows: Sequence[int]) -> Case:
    x, output, previous, noise = (_random(sizes, sum(rows), _LATENT_CHANNELS) for _ in range(4))
    table = torch.rand(len(rows), _NUM_COEFFICIENTS).tolist()
    coefficients = torch.tensor(table, device=sizes.device)
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).int().to(sizes.device)
    return Case(
        "sampler_update",
        f"{_shape(x)}, {len(rows)} images",
        6 * x.nbytes + owner.nbytes,
        lambda: naive.sampler_update(x, output, previous, noise, table, rows),
        lambda function: function(x, output, previous, noise, coefficients, owner),
    )


def _random(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=sizes.device).to(sizes.dtype)


def _shape(x: Tensor) -> str:
    return " x ".join(str(size) for size in x.shape)
