"""A cascade through the service: which model an image is of, and what a reply says of it."""

from __future__ import annotations

import pytest

from tests.cell.local_service import LocalService
from tests.e2e.cascade_calls import answers_of, call, images_of_stages
from tests.e2e.pixels import pixels_differ

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]

IMAGES = 6
STAGES = {"light": ["light", "score"], "heavy": ["light", "score", "heavy"]}


@pytest.fixture(scope="module")
def images(service: LocalService) -> dict[tuple[str, int], bytes]:
    return images_of_stages(service, IMAGES)


def test_a_reply_says_how_it_came_about(
    service: LocalService, images: dict[tuple[str, int], bytes]
) -> None:
    answers = answers_of(service, images)
    for one in answers.values():
        assert one["reason"] == ("confident" if one["stage"] == "light" else "deferred")
        assert (one["confidence"] >= one["threshold"]) == (one["stage"] == "light")
        assert [stage["stage"] for stage in one["stages"]] == STAGES[one["stage"]]
    # easy prompts and hard ones take turns
    assert {one["stage"] for one in answers.values()} == {"light", "heavy"}


@pytest.mark.parametrize(("quality", "stage"), [("low", "light"), ("high", "heavy")])
def test_a_quality_chooses_the_model(
    service: LocalService, images: dict[tuple[str, int], bytes], quality: str, stage: str
) -> None:
    image, data = call(service, 1, quality=quality)
    assert (image["cascade"]["stage"], image["cascade"]["reason"]) == (stage, "quality")
    assert pixels_differ(data, images[stage, 1]) <= 1
