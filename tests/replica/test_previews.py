"""Previews on their way from a real engine to whoever watches the dispatcher."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
from PIL import Image

from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed, Preview
from ray_cluster.requests import OutputSpec
from tests.engine.harness import request
from tests.engine.staged import StagedModel
from tests.replica.setup import Link, new_service, offer, serving

SHOWN = request("a", num_steps=12, output=OutputSpec("webp", 90, False, num_previews=3))


async def watched(link: Link) -> tuple[list[Preview], Any]:
    previews: list[Preview] = []
    while True:
        seen = previews[-1].index if previews else -1
        view = await link.service.watch("a", seen, 5.0)
        if view.outcome is not None:
            return previews, view.outcome
        if view.preview is not None:
            previews.append(view.preview)


async def test_who_watches_sees_previews_and_then_the_image(
    model: StagedModel, coder: ImageCoder
) -> None:
    link = Link(new_service())
    async with serving(model, coder, "one", link=link):
        await offer(link.service, [SHOWN])
        previews, outcome = await watched(link)
    assert isinstance(outcome, Completed)
    assert previews
    assert [preview.index for preview in previews] == sorted(preview.index for preview in previews)
    for preview in previews:
        assert preview.steps_done == (3, 6, 9)[preview.index]
        image = Image.open(io.BytesIO(preview.data))
        assert (image.format, image.size) == ("WEBP", (64, 64))
        assert np.asarray(image).std() > 0


async def test_a_lost_preview_costs_nothing_else(model: StagedModel, coder: ImageCoder) -> None:
    link = Link(new_service())
    link.fails = lambda name, _side: name == "show"
    async with serving(model, coder, "one", link=link):
        await offer(link.service, [SHOWN])
        previews, outcome = await watched(link)
    assert isinstance(outcome, Completed)
    assert previews == []
    assert link.num_lost > 0


async def test_an_aborted_request_is_shown_no_more(model: StagedModel, coder: ImageCoder) -> None:
    link = Link(new_service())
    gate = model.gate("decode", "?")
    async with serving(model, coder, "one", link=link):
        await offer(link.service, [SHOWN])
        await asyncio.to_thread(gate.await_reached)
        await link.service.abort(["a"])
        gate.open()
        view = await link.service.watch("a", -1, 0.5)
        assert view.preview is None
        assert view.outcome is not None
