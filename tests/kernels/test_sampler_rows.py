"""The sampler step over pixels of all images, and by Triton, against its formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.ops import CONTROL_FACTOR, DTYPES, Ops, gap, tolerance

OP = ("sampler_update", "sampler_update")


def written_out(
    x: Tensor, m: Tensor, before: Tensor, z: Tensor | None, coefficients: Tensor, rows: list[int]
) -> tuple[Tensor, Tensor]:
    """One row after the other, in float64."""
    advanced, denoised = torch.empty_like(x.double()), torch.empty_like(x.double())
    for row, owner in enumerate(rows):
        a, b, keep, direct, toward, history, noise, clip = coefficients[owner].double().tolist()
        denoised[row] = (a * x[row].double() + b * m[row].double()).clamp(-clip, clip)
        advanced[row] = keep * x[row].double() + direct * m[row].double()
        advanced[row] += toward * denoised[row] + history * before[row].double()
        if z is not None:
            advanced[row] += noise * z[row].double()
    return advanced, denoised


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(len(shape))
    return [torch.randn(shape).to(dtype) for _ in range(4)]


def schedule_rows(count: int) -> Tensor:
    """Coefficients as the engine has them: part of a wider matrix, some clips infinite."""
    wide = torch.randn(count, 10)
    wide[:, 9] = torch.where(torch.arange(count) % 2 == 0, math.inf, 0.5)
    return wide[:, 2:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_noisy", [True, False])
@pytest.mark.parametrize("num_columns", [4, 7, 64])
def test_every_pixel_is_advanced_by_its_own_images_coefficients(
    ops: Ops, num_columns: int, is_noisy: bool, dtype: torch.dtype
) -> None:
    rows = [0] * 3 + [2] * 70 + [1] + [4] * 33 + [0] * 2
    x, m, before, z = tensors((len(rows), num_columns), dtype)
    noise = z if is_noisy else None
    coefficients = schedule_rows(5)
    found = ops(*OP, x, m, before, noise, coefficients, torch.tensor(rows).int())
    truth = written_out(x, m, before, noise, coefficients, rows)
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == dtype
        # a sum of five products
        assert gap(one, other) <= 2 * tolerance(dtype)
    shuffled = written_out(x, m, before, noise, coefficients, rows[::-1])
    assert gap(found[0], shuffled[0]) >= CONTROL_FACTOR * 2 * tolerance(dtype)


@pytest.mark.parametrize("shape", [(5, 4, 7, 3), (3, 1500), (1, 1), (0, 4, 8, 8), (2, 0)])
def test_images_are_advanced_as_rows_without_numbers(ops: Ops, shape: tuple[int, ...]) -> None:
    x, m, before, z = tensors(shape, torch.float32)
    coefficients = schedule_rows(shape[0])
    found = ops(*OP, x, m, before, z, coefficients)
    truth = written_out(x, m, before, z, coefficients, list(range(shape[0])))
    assert [one.shape for one in found] == [x.shape, x.shape]
    for one, other in zip(found, truth, strict=True):
        assert gap(one, other) <= 2 * tolerance(torch.float32)


def test_tensors_need_not_be_contiguous(ops: Ops) -> None:
    coefficients = schedule_rows(6)
    apart = [one.T for one in tensors((4, 6), torch.float32)]
    assert not any(one.is_contiguous() for one in (coefficients, *apart))
    placed = (one.to(ops.device) for one in (*apart, coefficients))
    found = ops.function(*OP)(*placed)
    truth = written_out(*apart, coefficients, list(range(6)))
    for one, other in zip(found, truth, strict=True):
        assert gap(one, other) <= 2 * tolerance(torch.float32)


def test_a_failed_pixel_stays_one_and_alone(ops: Ops) -> None:
    """A finite clip must not turn NaN into a number: by it a failed request is known."""
    x, m, before, z = tensors((6, 4), torch.float32)
    m[2, 1] = float("nan")
    coefficients = schedule_rows(2)
    for owner in (0, 1):
        found = ops(*OP, x, m, before, z, coefficients, torch.full((6,), owner))
        for one in found:
            assert one.isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"output": torch.zeros(6, 3)}, "latents' shape"),
        ({"rows": torch.zeros(5, dtype=torch.int32)}, "6 rows need"),
        ({"rows": None}, "6 rows need"),
        ({"coefficients": torch.zeros(2, 7)}, "rows of coefficients"),
    ],
)
def test_what_does_not_fit_is_refused(ops: Ops, changes: dict[str, Any], word: str) -> None:
    x = torch.zeros(6, 4)
    arguments = {"latents": x, "output": x, "previous": x, "noise": None}
    arguments |= {"coefficients": torch.zeros(2, 8), "rows": torch.zeros(6).int()} | changes
    with pytest.raises(ValueError, match=word):
        ops.function(*OP)(**arguments)
