"""Images of several sizes that the service makes together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cell.local_service import LocalService
from tests.e2e.jobs import scrape, wait_for_replicas
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import images, post

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]

SIZES = ("64x64", "96x96", "128x128", "64x128", "128x64")
STEPS = 12


def make(service: LocalService, size: str) -> bytes:
    (image,) = images(post(service, size=size, seed=5, num_inference_steps=STEPS))
    return image


def test_images_of_all_sizes_share_steps_and_are_as_if_alone(service: LocalService) -> None:
    wait_for_replicas(service)
    alone = {size: make(service, size) for size in SIZES}
    before = scrape(service)
    with ThreadPoolExecutor(2 * len(SIZES)) as pool:
        together = list(pool.map(lambda size: make(service, size), SIZES * 2))
    for size, image in zip(SIZES * 2, together, strict=True):
        assert pixels_differ(image, alone[size]) <= 1
    after = scrape(service)

    def grown(name: str, **labels: str) -> int:
        return after.total(name, **labels) - before.total(name, **labels)

    mixed = grown("step_batch_sizes_count") - grown("step_batch_sizes_bucket", le="1.0")
    # at least as many as one image takes were of several sizes
    assert mixed >= STEPS
    assert grown("step_batch_images_sum") == STEPS * len(together)
