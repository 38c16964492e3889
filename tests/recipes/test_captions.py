"""The caption grammar reads back what it writes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.quality.captions import (
    CaptionError,
    caption_words,
    write_caption,
)
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    LAYOUTS,
    SHAPES,
    Scene,
    SceneObject,
    has_held_out_object,
    is_held_out,
    omit_details,
    sample_training_scene,
)

seeds = st.integers(0, 2**32)


def test_scenes_that_differ_have_captions_that_differ() -> None:
    rng = random.Random(1)
    drawn = (sample_training_scene(rng, 0.5) for _ in range(2000))
    scenes = {omit_details(scene, rng, 0.7) for scene in drawn}
    assert len({write_caption(scene) for scene in scenes}) == len(scenes)


@given(seeds, st.floats(0, 1))
def test_training_scenes_hold_no_held_out_combination(seed: int, single: float) -> None:
    scene = sample_training_scene(random.Random(seed), single)
    assert scene.is_placed
    assert scene.background is not None
    assert not has_held_out_object(scene)


def test_a_fifth_of_the_combinations_is_held_out_and_no_value_is_missing() -> None:
    held = [
        (shape, colour, background)
        for shape in SHAPES
        for colour in COLOURS
        for background in BACKGROUNDS
        if is_held_out(shape, colour, background)
    ]
    assert len(held) == 57
    for index, values in enumerate((SHAPES, COLOURS, BACKGROUNDS)):
        per_value = len(SHAPES) * len(COLOURS) * len(BACKGROUNDS) / len(values)
        for value in values:
            assert 0.1 < sum(one[index] == value for one in held) / per_value < 0.35


def test_captions_read_as_documented() -> None:
    thing = SceneObject("circle", "red", "large", "center")
    caption = "a large red circle in the center on a black background"
    assert write_caption(Scene((thing,), "black")) == caption
    others = (SceneObject("ring", "blue", None, "top"), SceneObject("star", "pink", None, "bottom"))
    assert write_caption(Scene(others)) == "a blue ring above a pink star"


def test_four_objects_fit_the_tokens_with_room_for_both_ends() -> None:
    rows = LAYOUTS[-1]
    things = tuple(SceneObject("circle", "red", "large", place) for row in rows for place in row)
    assert len(write_caption(Scene(things, "checkered")).split()) + 2 <= 32


def test_objects_in_no_layout_have_no_caption() -> None:
    things = (SceneObject("ring", "blue", None, "top"), SceneObject("star", "pink", None, "left"))
    with pytest.raises(CaptionError, match="are in no layout"):
        write_caption(Scene(things))


def test_the_word_list_covers_every_caption() -> None:
    words, rng = set(caption_words()), random.Random(1)
    for _ in range(200):
        assert words.issuperset(write_caption(sample_training_scene(rng, 0.5)).split())
