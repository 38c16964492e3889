"""How many steps a strength leaves, and where an edit is made: tables, and properties of draws."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ray_cluster.policies.edits import (
    Box,
    EditGeometry,
    SizeBounds,
    SizePx,
    computed_steps,
    edit_geometry,
    reference_size,
    steps_of_schedule,
)

SHAPES = SizeBounds(multiple_px=8, min_px=64, max_px=128, native_px=(64, 64))
SDXL = SizeBounds(multiple_px=8, min_px=512, max_px=1536, native_px=(1024, 1024))
# 0.29, 0.57 and 0.58 times a hundred are a little below whole numbers, as floats
STRENGTHS = sorted({index / 100 for index in range(1, 101)} | {1 / 3, 0.005, 0.999, 1 - 1e-12})


def noise_steps(num_inference_steps: int, strength: float) -> int:
    """``get_timesteps`` of StableDiffusion(XL)Img2ImgPipeline and of their inpaint pipelines."""
    init_timestep = min(int(num_inference_steps * strength), num_inference_steps)
    return num_inference_steps - max(num_inference_steps - init_timestep, 0)


def flow_steps(num_inference_steps: int, strength: float) -> int:
    """``get_timesteps`` of StableDiffusion3... and Flux...Img2ImgPipeline and InpaintPipeline."""
    init_timestep = min(num_inference_steps * strength, num_inference_steps)
    return num_inference_steps - int(max(num_inference_steps - init_timestep, 0))


def test_the_steps_of_a_strength_are_those_of_diffusers() -> None:
    for schedule_steps in range(1, 61):
        for strength in STRENGTHS:
            given_ = schedule_steps, strength
            assert computed_steps(*given_, is_flow=False) == noise_steps(*given_), given_
            assert computed_steps(*given_, is_flow=True) == flow_steps(*given_), given_


@pytest.mark.parametrize(
    ("schedule_steps", "strength", "noise", "flow"),
    [
        (20, 1.0, 20, 20),
        (20, 0.8, 16, 16),
        (20, 0.33, 6, 7),
        (20, 0.04, 0, 1),
        (1, 0.99, 0, 1),
        # 29 would be exact; 100 * 0.29 is 28.999999999999996
        (100, 0.29, 28, 29),
    ],
)
def test_noise_schedules_round_down_and_flows_up(
    schedule_steps: int, strength: float, noise: int, flow: int
) -> None:
    assert computed_steps(schedule_steps, strength, is_flow=False) == noise
    assert computed_steps(schedule_steps, strength, is_flow=True) == flow


@pytest.mark.parametrize("is_flow", [False, True])
def test_a_schedule_is_the_shortest_that_leaves_exactly_so_many_steps(is_flow: bool) -> None:
    for num_steps in range(1, 61):
        for strength in STRENGTHS:
            length = steps_of_schedule(num_steps, strength, is_flow=is_flow)
            assert computed_steps(length, strength, is_flow=is_flow) == num_steps
            assert computed_steps(length - 1, strength, is_flow=is_flow) < num_steps


@pytest.mark.parametrize(
    ("image", "size", "canvas", "work"),
    [
        # made as it is
        ((64, 96), None, (64, 96), (64, 96)),
        ((500, 300), (64, 96), (64, 96), (64, 96)),
        # filled up to the grid
        ((65, 96), None, (65, 96), (72, 96)),
        ((127, 121), None, (127, 121), (128, 128)),
        # a recipe asks for such a size
        ((500, 300), (70, 65), (70, 65), (72, 72)),
        # brought into the bounds, in its proportions
        ((256, 128), None, (128, 64), (128, 64)),
        ((300, 200), None, (128, 85), (128, 88)),
        ((32, 32), None, (64, 64), (64, 64)),
        ((40, 50), None, (64, 80), (64, 80)),
        ((1, 1), None, (64, 64), (64, 64)),
        # as far as the bounds allow
        ((1000, 10), None, (128, 64), (128, 64)),
        ((10, 1000), None, (64, 128), (64, 128)),
        ((20, 120), None, (64, 128), (64, 128)),
    ],
)
def test_an_edit_of_a_whole_image(
    image: SizePx, size: SizePx | None, canvas: SizePx, work: SizePx
) -> None:
    found = edit_geometry(image, SHAPES, size_px=size)
    assert found == EditGeometry(canvas, None, work)
    assert found.is_plain == (canvas == work)


@pytest.mark.parametrize(
    ("canvas", "mask", "window", "work"),
    [
        # the native size, around the mask's centre, and no further than the canvas
        ((3000, 2000), Box(1500, 1000, 20, 10), Box(998, 493, 1024, 1024), (1024, 1024)),
        ((3000, 2000), Box(0, 0, 20, 10), Box(0, 0, 1024, 1024), (1024, 1024)),
        ((3000, 2000), Box(2990, 1990, 10, 10), Box(1976, 976, 1024, 1024), (1024, 1024)),
        # a quarter of the mask's longer side on each side of it
        ((3000, 2000), Box(500, 500, 800, 100), Box(300, 38, 1200, 1024), (1200, 1024)),
        # more than the model makes is scaled down
        ((3000, 2000), Box(500, 0, 2000, 100), Box(0, 0, 3000, 1104), (1536, 568)),
        # a canvas that is narrower than the native size
        ((3000, 500), Box(1500, 100, 20, 10), Box(998, 0, 1024, 500), (1024, 512)),
        # nothing is left out: the whole image
        ((1024, 1000), Box(10, 10, 20, 10), None, (1024, 1000)),
        ((1001, 999), Box(10, 10, 20, 10), None, (1008, 1000)),
        # all of an image that would be resized without the crop
        ((30, 20), Box(1, 1, 2, 2), Box(0, 0, 30, 20), (512, 512)),
        ((2000, 600), Box(9, 9, 1900, 580), Box(0, 0, 2000, 600), (1536, 512)),
    ],
)
def test_an_edit_of_a_part(canvas: SizePx, mask: Box, window: Box | None, work: SizePx) -> None:
    assert edit_geometry(canvas, SDXL, crop_to=mask) == EditGeometry(canvas, window, work)


def test_a_part_of_a_resized_image_is_one_of_the_canvas() -> None:
    found = edit_geometry((99, 77), SDXL, size_px=(3000, 2000), crop_to=Box(0, 0, 8, 8))
    assert found.canvas_px == (3000, 2000)
    assert found.window == Box(0, 0, 1024, 1024)
    assert not found.is_plain


sides = st.integers(1, 5000)
sizes = st.tuples(sides, sides)


@st.composite
def some_bounds(draw: st.DrawFn) -> SizeBounds:
    multiple = draw(st.sampled_from([1, 8, 16, 64]))
    # off the grid, as a configuration may have them
    min_px = draw(st.integers(1, 600))
    max_px = draw(st.integers(min_px, 2048))
    lowest, highest = -(-min_px // multiple), max_px // multiple
    assume(0 < lowest <= highest)
    native = draw(st.tuples(*[st.integers(lowest, highest)] * 2))
    return SizeBounds(multiple, min_px, max_px, (native[0] * multiple, native[1] * multiple))


@st.composite
def masks_on(draw: st.DrawFn, canvas: SizePx) -> Box:
    left, top = (draw(st.integers(0, side - 1)) for side in canvas)
    return Box(
        left, top, draw(st.integers(1, canvas[0] - left)), draw(st.integers(1, canvas[1] - top))
    )


def check_work(work: SizePx, window: SizePx, bounds: SizeBounds) -> None:
    """The model makes this size, and what it is to see fits in, not smaller than it must be."""
    scale = min(1.0, *(bounds.highest_px / side for side in window))
    for made, shown in zip(work, window, strict=True):
        assert made % bounds.multiple_px == 0
        assert bounds.lowest_px <= made <= bounds.highest_px
        assert made >= shown * scale - 1e-6
        assert made < shown * scale + bounds.multiple_px or made == bounds.lowest_px


@given(image=sizes, bounds=some_bounds())
def test_a_whole_image_is_brought_within_the_bounds(image: SizePx, bounds: SizeBounds) -> None:
    found = edit_geometry(image, bounds)
    assert found.window is None
    check_work(found.work_px, found.canvas_px, bounds)
    is_within = all(bounds.lowest_px <= side <= bounds.highest_px for side in image)
    assert is_within == (found.canvas_px == image)
    for side, made in zip(found.canvas_px, found.work_px, strict=True):
        # nothing is scaled between the canvas and what the model makes
        assert bounds.lowest_px <= side <= made < side + bounds.multiple_px


@given(image=sizes, bounds=some_bounds())
def test_proportions_change_only_where_the_bounds_ask_for_it(
    image: SizePx, bounds: SizeBounds
) -> None:
    short, long = sorted(image)
    # room for rounding: a pixel of either side
    assume(long * bounds.lowest_px < short * (bounds.highest_px - 1))
    canvas = edit_geometry(image, bounds).canvas_px
    scale = max(canvas) / long
    assert all(abs(side * scale - made) <= 1 for side, made in zip(image, canvas, strict=True))


@given(canvas=sizes, bounds=some_bounds(), data=st.data())
def test_a_part_holds_the_mask_and_lies_on_the_canvas(
    canvas: SizePx, bounds: SizeBounds, data: st.DataObject
) -> None:
    mask = data.draw(masks_on(canvas))
    found = edit_geometry(canvas, bounds, crop_to=mask)
    assert found.canvas_px == canvas
    window = found.window or Box(0, 0, *canvas)
    if found.window is None:
        assert found == edit_geometry(canvas, bounds), "a recipe would say nothing of the crop"
    check_work(found.work_px, window.size_px, bounds)
    margin = max(8, math.ceil(max(mask.size_px) / 4))
    for start, side, mask_start, mask_side, most, native in (
        (window.left_px, window.width_px, mask.left_px, mask.width_px, canvas[0], 0),
        (window.top_px, window.height_px, mask.top_px, mask.height_px, canvas[1], 1),
    ):
        assert start >= 0
        assert start + side <= most
        # the margin, or all that there is
        assert start <= max(0, mask_start - margin)
        assert start + side >= min(most, mask_start + mask_side + margin)
        assert side >= min(most, bounds.native_px[native])
        assert side == most or side % bounds.multiple_px == 0


@given(canvas=sizes, bounds=some_bounds(), data=st.data())
def test_a_part_is_never_made_coarser_than_the_whole_image(
    canvas: SizePx, bounds: SizeBounds, data: st.DataObject
) -> None:
    found = edit_geometry(canvas, bounds, crop_to=data.draw(masks_on(canvas)))
    window = canvas if found.window is None else found.window.size_px
    scales = [bounds.highest_px / max(size) for size in (window, canvas)]
    assert min(1.0, scales[0]) >= min(1.0, scales[1])


@given(bounds=some_bounds(), data=st.data())
def test_a_size_on_the_grid_is_plain(bounds: SizeBounds, data: st.DataObject) -> None:
    step = bounds.multiple_px
    side = st.integers(bounds.lowest_px // step, bounds.highest_px // step).map(step.__mul__)
    size = data.draw(st.tuples(side, side))
    image = data.draw(sizes)
    assert edit_geometry(image, bounds, size_px=size) == EditGeometry(size, None, size)
    assert edit_geometry(size, bounds).is_plain


@given(st.integers(1, 70_000), st.floats(1, 8), st.booleans(), st.integers(64, 1024))
def test_a_picture_is_seen_with_the_least_side_and_no_longer_strip(
    short: int, ratio: float, is_wide: bool, side: int
) -> None:
    size = (short, int(short * ratio))
    most_px = side**2
    seen = reference_size(
        size if is_wide else size[::-1], 16, most_px, least_side_px=64, most_ratio=8
    )
    assert all(one % 16 == 0 for one in seen)
    assert min(seen) >= 64
    assert max(seen) <= 8 * min(seen)
    assert seen[0] * seen[1] <= most_px


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([8, 16, 32]))
def test_a_picture_is_seen_on_the_grid_and_never_enlarged(width: int, height: int, by: int) -> None:
    most_px = 1 << 20
    seen = reference_size((width, height), by, most_px)
    assert all(side % by == 0 and side >= by for side in seen)
    assert seen[0] * seen[1] <= most_px
    assert all(side <= max(by, own) for side, own in zip(seen, (width, height), strict=True))
    if width * height <= most_px and min(width, height) >= by:
        assert seen == (width // by * by, height // by * by)
    if min(seen) > 4 * by:
        # cut by less than a multiple
        assert abs(math.log(seen[0] / seen[1] * height / width)) < by / min(seen) * 1.3
