"""The renderer paints what a scene says, at every size."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.quality.render import (
    COLOUR_RGB,
    RADIUS,
    Jitter,
    object_distance,
    paint_backgrounds,
    place,
    render,
    signed_distance,
)
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    Scene,
    SceneObject,
    sample_several,
    sample_single,
)
from tests.examples import a_few

SIZES = [(64, 64), (96, 96), (128, 128), (64, 96), (128, 64), (63, 41)]
seeds = st.integers(0, 2**32)


def single(shape: str = "circle", size: str = "large", position: str = "center") -> Scene:
    return Scene((SceneObject(shape, "red", size, position),), "black")  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "height"), SIZES)
@a_few  # each draws scenes pixel by pixel
@given(seed=seeds)
def test_pictures_have_their_size_and_stay_in_range(width: int, height: int, seed: int) -> None:
    rng = random.Random(seed)
    scenes = [sample_single(rng), sample_several(rng)]
    pictures = render(scenes, width=width, height=height, jitter=Jitter(), seed=seed)
    assert pictures.shape == (2, 3, height, width)
    assert pictures.min() >= 0
    assert pictures.max() <= 1


@given(seeds)
def test_objects_never_touch_each_other_or_the_edge(seed: int) -> None:
    rng = random.Random(seed)
    scenes = [sample_several(rng) for _ in range(8)]
    placed = place(scenes, width=64, height=64, jitter=Jitter(), seed=seed)
    inside = object_distance(placed, width=64, height=64) < 0
    assert inside.sum(1).max() <= 1
    border = torch.cat([inside[..., 0], inside[..., -1], inside[..., 0, :], inside[..., -1, :]])
    assert not border.any()


def test_the_same_seed_gives_the_same_picture_and_another_one_does_not() -> None:
    scenes = [single()]
    first = render(scenes, width=64, height=64, jitter=Jitter(), seed=1)
    again = render(scenes, width=64, height=64, jitter=Jitter(), seed=1)
    other = render(scenes, width=64, height=64, jitter=Jitter(), seed=2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "height"), [(64, 128), (128, 64), (96, 64)])
def test_shapes_are_not_stretched(shape: str, width: int, height: int) -> None:
    wide = render([single(shape)], width=width, height=height)
    square = render([single(shape)], width=64, height=64)
    top, left = (height - 64) // 2, (width - 64) // 2
    assert torch.allclose(wide[..., top : top + 64, left : left + 64], square, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_resolution_is_the_same_picture(shape: str) -> None:
    fine = torch.nn.functional.avg_pool2d(render([single(shape)], width=256, height=256), 4)
    assert (fine - render([single(shape)], width=64, height=64)).abs().mean() < 0.005


@pytest.mark.parametrize("shape", SHAPES)
def test_distances_are_lipschitz_and_have_an_inside_within_the_radius(shape: str) -> None:
    axis = torch.linspace(-1.5, 1.5, 121)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    distance = signed_distance(shape, grid)  # type: ignore[arg-type]
    step = float(axis[1] - axis[0])
    assert distance.diff(dim=0).abs().max() <= step * 1.01
    inside = distance < 0
    assert inside.any()
    assert grid[inside].abs().max() <= 1.0


def test_positions_lie_on_their_side() -> None:
    scenes = [single(position=position) for position in POSITIONS]
    centre = place(scenes, width=128, height=64).centre[:, 0]
    for position, (x, y) in zip(POSITIONS, centre.tolist(), strict=True):
        assert (x < 0) == ("left" in position)
        assert (x > 0) == ("right" in position)
        assert (y < 0) == ("top" in position)
        assert (y > 0) == ("bottom" in position)


def test_a_large_object_covers_more_than_a_small_one() -> None:
    ratio = (RADIUS["large"] / RADIUS["small"]) ** 2
    large, small = (
        (render([single(size=s)], width=128, height=128) > 0.5).sum() for s in ("large", "small")
    )
    assert float(large / small) == pytest.approx(ratio, rel=0.1)


def test_object_colours_differ_clearly_from_each_other_and_from_every_background() -> None:
    colours = torch.tensor([COLOUR_RGB[name] for name in COLOURS])
    grounds = paint_backgrounds(torch.arange(len(BACKGROUNDS)), width=64, height=64)
    tints = grounds.permute(0, 2, 3, 1).reshape(-1, 3).unique(dim=0)
    assert torch.pdist(colours).min() > 0.3
    assert torch.cdist(colours, tints).min() > 0.3


def test_an_incomplete_scene_cannot_be_rendered() -> None:
    with pytest.raises(ValueError, match="complete"):
        render([Scene((SceneObject("circle", "red"),), "black")], width=64, height=64)
