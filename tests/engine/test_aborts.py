"""Aborts, at every stage."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from ray_cluster.requests import ImageRequest
from tests.engine.failing import BAD, STAGES, requests_with_a_bad_one
from tests.engine.harness import (
    PIXEL_TOLERANCE,
    pixel_difference,
    request,
)
from tests.engine.staged import Running, StagedModel, StageName, until

Record = Callable[[str, object], None]

# --- aborts ---


@pytest.mark.parametrize("at", ["waiting to encode", *STAGES, "waiting to decode"])
def test_an_abort_is_effective_at_once_wherever_the_request_is(
    model: StagedModel, pixels: dict[str, Any], at: str
) -> None:
    bad, other = request(BAD, **_fields(requests_with_a_bad_one()[2])), requests_with_a_bad_one()[0]
    stage: StageName = "encode" if "encode" in at else "decode" if "decode" in at else "denoise"
    held = other if at.startswith("waiting") else bad
    gate = model.gate(stage, held.request_id, call=2 if stage == "denoise" else 0)
    with Running(model.loaded) as running:
        running.submit(held)
        if at.startswith("waiting"):
            gate.await_reached()
            running.submit(bad)
            if stage == "decode":
                until(lambda: running.runner.steps_done_by_id.get(BAD) == 6, "all steps")
        else:
            running.submit(other)
            gate.await_reached()
        num_calls = len(model.calls)
        assert running.runner.abort(BAD)
        assert not running.runner.abort(BAD)
        assert BAD not in running.runner.steps_done_by_id
        gate.open()
        assert pixel_difference(running.events.pixels_of("r0"), pixels["r0"]) <= PIXEL_TOLERANCE
        until(lambda: running.runner.num_in_flight == 0)
        assert BAD not in running.events.ended_ids
        assert all(BAD not in ids for _, ids in model.calls[num_calls:])
        if at != "waiting to encode":
            until(lambda: gc.collect() >= 0 and model.embeds[BAD]() is None, "the row's memory")


def _fields(one: ImageRequest) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__ if name != "request_id"}


@pytest.mark.parametrize("at", STAGES)
def test_a_request_can_come_back_under_its_id_right_after_its_abort(
    model: StagedModel, pixels: dict[str, Any], at: StageName
) -> None:
    bad = requests_with_a_bad_one()[2]
    gate = model.gate(at, BAD, call=1 if at == "denoise" else 0)
    with Running(model.loaded) as running:
        running.submit(bad)
        gate.await_reached()
        with pytest.raises(ValueError, match="in flight already"):
            running.submit(bad)
        assert running.runner.abort(BAD)
        running.submit(bad)
        gate.open()
        assert pixel_difference(running.events.pixels_of(BAD), pixels[BAD]) <= PIXEL_TOLERANCE
        until(lambda: running.runner.num_in_flight == 0)
        assert running.events.ended_ids == [BAD]
        running.runner.check_alive(60.0)


def test_nothing_of_a_finished_request_is_kept_by_an_idle_runner(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        running.submit(*requests_with_a_bad_one())
        for one in requests_with_a_bad_one():
            running.events.end_of(one.request_id)
        running.events.all.clear()
        until(
            lambda: (
                gc.collect() >= 0 and not any(ref() is not None for ref in model.embeds.values())
            ),
            "the rows' memory",
        )
