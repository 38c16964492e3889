"""A picture is right when every object is, and nothing stands beside them."""

import torch

from ray_cluster.quality.classifier import ObjectReading, Reading
from ray_cluster.quality.scenes import Scene, SceneObject
from recipes.figures.scoring import Drawn, Share, count_shares

RED = ObjectReading("left", "circle", "red", "small")
BLUE = ObjectReading("right", "star", "blue", "large")
PIXELS = torch.zeros(3, 8, 8)


TWO = Scene(
    (SceneObject("circle", "red", "small", "left"), SceneObject("star", "blue", "large", "right")),
    "gray",
)
BARE = Scene((SceneObject("circle", "red"),))


def drawn(scene: Scene, *seen: ObjectReading, background: str | None = "gray") -> Drawn:
    return Drawn(scene, PIXELS, Reading(seen, background, "plain"))  # type: ignore[arg-type]


def test_all_objects_and_the_background_count() -> None:
    assert drawn(TWO, RED, BLUE).all_right
    assert not drawn(TWO, RED).all_right
    assert not drawn(TWO, RED, BLUE, background="navy").all_right
    wrong = ObjectReading("right", "ring", "blue", "large")
    shares = count_shares([drawn(TWO, RED, BLUE), drawn(TWO, RED, wrong), drawn(TWO, BLUE)])
    assert (shares["shape"], shares["colour"]) == (Share(4, 6), Share(5, 6))
    assert (shares["background"], shares["all"]) == (Share(3, 3), Share(1, 3))


def test_an_object_too_many_spoils_the_picture_only() -> None:
    more = ObjectReading("top", None, "green", None)
    one = drawn(TWO, RED, BLUE, more)
    assert all(all(marks.values()) for marks in one.object_marks)
    assert not one.all_right


def test_what_the_prompt_leaves_open_must_still_be_readable() -> None:
    assert drawn(BARE, RED).all_right
    assert not drawn(BARE, RED, background=None).all_right
    assert not drawn(BARE, ObjectReading("left", "circle", "red", None)).all_right
    # which of two is meant cannot be told
    assert count_shares([drawn(BARE, RED, BLUE)])["shape"] == Share(0, 1)


def test_intervals_hold_their_share() -> None:
    share = Share(right=9, total=10)
    low, high = share.interval
    assert 0.5 < low < share.value < high < 1.0
    assert Share(0, 10).interval[0] == 0.0
