"""Convolutions of patches with what is around them are those of the whole image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.models.downsampling import Downsample2D
from diffusers.models.upsampling import Upsample2D

from ray_cluster.engine.batch.token_layout import SizeGroup, layout_of
from ray_cluster.engine.models import packed_weights
from ray_cluster.engine.step.executor import KeptRow, RowReuse, StepBatch
from ray_cluster.engine.step.model_rows import KeptDeltas
from ray_cluster.engine.step.rings import Rings
from ray_cluster.engine.unet.grids import as_rows, grids_of, level_rows
from ray_cluster.engine.unet.halo import Size
from ray_cluster.engine.unet.parts import Downsample, Upsample
from ray_cluster.policies.steps.reuse import ActivePatches
from tests.engine.harness import CALL_TOLERANCE, difference

_CHANNELS = 8


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        ((12, 16), "padded after"),
        ((12, 20), "padded around"),
        ((9, 13), "padded around"),
        ((12, 16), "grown"),
        ((9, 13), "grown"),
    ],
)
@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_patches_on_their_way_to_another_level_see_the_whole_image(
    size: tuple[int, int], kind: str, patch_size: int
) -> None:
    torch.manual_seed(0)
    number = int(kind == "grown")
    layout = layout_of((SizeGroup(*size, 0, 1),), 2)
    sizes = [Size(one.segments[0].height, one.segments[0].width) for one in layout.levels]
    layer: Any
    if kind == "grown":
        layer = Upsample2D(_CHANNELS, use_conv=True, name="conv")
        part: Any = Upsample
    else:
        padding = int(kind == "padded around")
        layer = Downsample2D(_CHANNELS, use_conv=True, padding=padding, name="op")
        part = Downsample
    num_patches = -(-size[0] // patch_size) * -(-size[1] // patch_size)
    active = ActivePatches(patch_size, tuple(index % 3 != 1 for index in range(num_patches)))
    kept, fresh = (torch.randn(sizes[number].height * sizes[number].width, 8) for _ in range(2))
    batch: StepBatch[None] = StepBatch(
        layout,
        latents=torch.zeros(size[0] * size[1], _CHANNELS),
        timesteps=torch.zeros(1),
        prepared=(None,),
        guidance_scales=torch.ones(1),
        reuse=(RowReuse(1, (KeptRow((), (kept,)),), is_by_patch=True, active=active),),
    )
    rows = level_rows(batch)
    source, goal = rows[number].active[0], rows[1 - number].active[0]
    joined = kept.clone()
    joined[source] = fresh[source]
    with torch.inference_mode():
        images = joined.view(1, *sizes[number], _CHANNELS).permute(0, 3, 1, 2)
        options = {"output_size": sizes[0]} if kind == "grown" else {}
        expected = as_rows(layer(images, **options))[goal]
        grids = grids_of(batch, Rings(batch, 2), 2, rows, KeptDeltas())
        found = part(layer)(fresh[source], grids[number], grids[1 - number])
    assert 0 < len(goal) < layout.levels[1 - number].num_tokens
    assert difference(found, expected) <= CALL_TOLERANCE


@pytest.mark.parametrize("kind", ["as it is", "packed", "offloaded"])
def test_a_convolution_leaves_out_its_padding_and_has_it_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "packed" and not hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
        pytest.skip("this torch has no oneDNN")
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(_CHANNELS, 5, 3, padding=1)
    weight, bias = layer.weight.detach().clone(), layer.bias
    assert bias is not None
    bias = bias.detach().clone()
    monkeypatch.setattr(packed_weights, "can_pack", lambda _weight: kind == "packed")
    if kind == "offloaded":
        add_hook_to_module(layer, ModelHook())
    convolution = packed_weights.packed_conv(layer)
    with torch.inference_mode():
        for side in (3, 6):
            windows = torch.randn(4, side, side, _CHANNELS).permute(0, 3, 1, 2)
            for padding, found in (
                (0, convolution.unpadded(windows)),
                (1, convolution(windows)),
            ):
                expected = F.conv2d(windows, weight, bias, padding=padding)
                assert found.shape == expected.shape
                assert difference(found, expected) <= CALL_TOLERANCE
