"""Calls of a cascade, and of the two models that it is made of."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.jobs import growth, scrape
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Reached, post

CASCADE, LIGHT, HEAVY = "shapes-auto", "shapes-sd-light", "shapes-sd"
PROMPTS = (
    "a large red circle in the center on a black background",
    "a red circle left of a green star above a large blue square on a white background",
)
CLIENTS = 4


def prompt(seed: int) -> str:
    """Return an easy prompt and a hard one in turn."""
    return PROMPTS[seed % len(PROMPTS)]


def call(
    service: Reached, seed: int, model: str = CASCADE, **fields: Any
) -> tuple[dict[str, Any], bytes]:
    """Make one image; return what the reply says of it, and the image."""
    reply = post(service, model=model, prompt=prompt(seed), seed=seed, **fields)
    assert reply.status_code == 200, reply.text
    [image] = reply.json()["data"]
    return image, base64.b64decode(image.pop("b64_json"))


def images_of_stages(service: Reached, count: int) -> dict[tuple[str, int], bytes]:
    """Return each model's own images, by stage and seed."""
    wanted = {
        (stage, seed): model
        for stage, model in (("light", LIGHT), ("heavy", HEAVY))
        for seed in range(count)
    }
    with ThreadPoolExecutor(CLIENTS) as pool:
        made = pool.map(lambda key: call(service, key[1], wanted[key])[1], wanted)
        return dict(zip(wanted, made, strict=True))


def answers_of(service: Reached, images: dict[tuple[str, int], bytes]) -> dict[int, dict[str, Any]]:
    """Return how the cascade answers while nothing dies, by seed."""
    seeds = sorted({seed for _, seed in images})
    before = scrape(service)
    with ThreadPoolExecutor(CLIENTS) as pool:
        made = dict(zip(seeds, pool.map(lambda seed: call(service, seed), seeds), strict=True))
    found = {seed: image["cascade"] for seed, (image, _) in made.items()}
    for seed, (_, data) in made.items():
        assert pixels_differ(data, images[found[seed]["stage"], seed]) <= 1
    after = scrape(service)
    for stage in ("light", "heavy"):
        count = sum(one["stage"] == stage for one in found.values())
        assert growth(before, after, "cascade_images_total", cascade=CASCADE, stage=stage) == count
    return found
