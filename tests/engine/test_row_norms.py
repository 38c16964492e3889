"""The norm over rows of pixels, which runs on CUDA, is the UNet's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import SizeGroup, layout_of
from ray_cluster.engine.unet import parts
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.kernels.by_device import triton_twin
from ray_cluster.kernels.group_norm_silu import reference
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    call_model,
    difference,
    request,
    start_all,
)
from tests.kernels.conftest import triton_device

SIZES_PX = ((64, 64), (96, 96), (64, 64), (64, 128))
CPU = torch.device("cpu")


def largest_gap(zoo: Zoo, family: str) -> float:
    """How far the executor with that norm is from the one with PyTorch's, over a mixed batch."""
    model = zoo.model(family)
    requests = [
        request(f"r{i}", width_px=size[0], height_px=size[1], guidance_scale=1.0 + 2 * (i % 2))
        for i, size in enumerate(SIZES_PX)
    ]
    states = start_all(model, requests)
    unet = copy.deepcopy(zoo.reference(family).pipeline.unet)
    executor = UNetExecutor(unet, vae_scale_factor=8, device=CPU)
    given = (
        [state.latents for state in states],
        torch.linspace(1, 900, len(states)).round(),
        [state.conditioning for state in states],
        # a guided prediction multiplies what its rows are apart
        [1.0] * len(states),
    )
    pairs = zip(call_model(executor, *given), call_model(model.executor, *given), strict=True)
    return max(difference(*pair) for pair in pairs)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_the_norm_over_rows_is_the_models_own(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    numbers = []

    def counted(rows: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        numbers.append(len(bounds) - 1)
        return reference.group_norm_silu(rows, bounds, *args, **kwargs)

    zoo.model(family)
    monkeypatch.setattr(parts, "has_row_norm", lambda _norm: True)
    monkeypatch.setattr(parts, "group_norm_silu", counted)
    assert largest_gap(zoo, family) <= CALL_TOLERANCE
    # resnets' norms take the two images of a size, the others those of all three
    assert set(numbers) == {2, 6}


@pytest.mark.parametrize("activates", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_the_kernel_normalises_images_in_either_memory_order(
    monkeypatch: pytest.MonkeyPatch, activates: bool, count: int
) -> None:
    norm = torch.nn.GroupNorm(4, 16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    plain = parts.Normalise(norm, activates=activates)
    monkeypatch.setattr(parts, "has_row_norm", lambda _norm: True)
    twin = triton_twin(reference.group_norm_silu)
    monkeypatch.setattr(parts, "group_norm_silu", twin)
    device = triton_device()
    over_rows = parts.Normalise(norm.to(device), activates=activates)
    [segment] = layout_of((SizeGroup(4, 6, 0, count),), 1).levels[0].segments
    images = torch.randn(count, 16, 4, 6)
    with torch.inference_mode():
        norm.cpu()
        expected = plain(images.clone(), segment)
        norm.to(device)
        for order in (torch.contiguous_format, torch.channels_last):
            given = images.to(device).contiguous(memory_format=order)
            found = over_rows(given, segment)
            assert difference(found.cpu(), expected) <= CALL_TOLERANCE
            # convolutions go on in the order of the flat matrix
            assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_norm_over_all_images_of_a_size_would_show(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joint(rows: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return reference.group_norm_silu(rows, bounds[[0, -1]], *args, **kwargs)

    zoo.model("sd")
    monkeypatch.setattr(parts, "has_row_norm", lambda _norm: True)
    monkeypatch.setattr(parts, "group_norm_silu", joint)
    assert largest_gap(zoo, "sd") >= CONTROL_FACTOR * CALL_TOLERANCE
