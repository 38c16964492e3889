"""Copies of rows: as good as the rows themselves, made at the right steps, and no burden."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.step.state import RequestState
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    difference,
    drive,
    engine_of,
    pixel_difference,
    pool,
    request,
    run_alone,
    start,
)
from tests.engine.staged import Events, Running, StagedModel, until

REQUESTS = [
    request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i, num_steps=4 + i) for i in range(5)
]
BY_ID = {one.request_id: one for one in REQUESTS}


@pytest.mark.parametrize(
    ("name", "sampler"), [*(("sd", one) for one in SAMPLER_NAMES), ("sdxl", "dpmpp_2m")]
)
def test_a_copy_goes_on_elsewhere_and_the_row_goes_on_here(
    zoo: Zoo, name: str, sampler: str
) -> None:
    model = zoo.model(name)
    one = request(sampler=sampler, num_steps=5, negative_prompt="blue")
    expected = run_alone(model, one)
    engine = engine_of(model)
    engine.add(row := start(model, one))
    copies, exported = [], []
    with torch.inference_mode():
        while len(engine):
            copies.append(engine.copy_state("a"))
            exported.append(row.to_bytes())
            engine.step()
    assert difference(row.latents, expected) == 0.0
    # nothing that the row did later has changed its copies
    assert [copy.to_bytes() for copy in copies] == exported
    for steps_done, data in enumerate(exported):
        state = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)
        assert (state.step_index, state.unstored_steps) == (steps_done, 0)
        for one_way in (state, copies[steps_done]):
            run = drive(engine_of(model), {0: [one_way]})
            assert difference(run.latents("a"), expected) == 0.0


def test_only_a_row_that_is_held_can_be_copied(zoo: Zoo) -> None:
    with pytest.raises(KeyError):
        engine_of(zoo.model("sd")).copy_state("nobody")


# --- by a runner ---


class Sink:
    """Takes note of what it is given, and keeps nothing.

    Attributes:
        cost_s: set by the first probe.
    """

    def __init__(self) -> None:
        self.cost_s: float | None = None
        self.busy: set[str] = set()
        self.kept: list[tuple[RequestState, Callable[[], bool]]] = []
        self.num_probes = 0

    def is_busy(self, request_id: str) -> bool:
        return request_id in self.busy

    def probe(self, _state: RequestState) -> None:
        self.num_probes += 1
        self.cost_s = 1.0

    def keep(self, state: RequestState, is_wanted: Callable[[], bool]) -> None:
        self.kept.append((state, is_wanted))

    def steps_of(self, request_id: str) -> list[int]:
        return [one.step_index for one, _ in self.kept if one.request.request_id == request_id]


class Exporting(Running):
    """A runner that exports to a sink every so many steps."""

    def __init__(self, model: Any, sink: Sink, interval: Callable[..., int | None]) -> None:
        self.events = Events()
        self.runner = build_runner(
            model,
            pool("unused"),
            clock=time.monotonic,
            sink=sink,
            interval=interval,
        )


@pytest.fixture(scope="module")
def staged(zoo: Zoo) -> StagedModel:
    return StagedModel(zoo.model("sd"), REQUESTS)


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    yield from staged.lent()


def test_every_row_is_exported_every_so_many_steps_and_a_short_one_never(
    model: StagedModel,
) -> None:
    sink, pixels = Sink(), model.pixels()
    short = request("short", num_steps=3)
    with Exporting(model.loaded, sink, lambda *_: 3) as running:
        running.submit(*REQUESTS, short)
        for key in BY_ID:
            assert pixel_difference(running.events.pixels_of(key), pixels[key]) <= 1
        running.events.end_of("short")
    assert sink.num_probes == 1
    assert sink.steps_of("short") == []
    for key, one in BY_ID.items():
        # nothing is left to go on with after the last step
        assert sink.steps_of(key) == list(range(3, one.num_steps, 3))
    # nobody wants the states of requests that are through
    assert not any(is_wanted() for _, is_wanted in sink.kept)


def test_a_row_is_not_exported_again_before_its_last_copy_is_kept(model: StagedModel) -> None:
    sink = Sink()
    sink.busy.add("r4")
    with Exporting(model.loaded, sink, lambda *_: 2) as running:
        running.submit(BY_ID["r3"], BY_ID["r4"])
        running.events.end_of("r3")
        running.events.end_of("r4")
    assert sink.steps_of("r4") == []
    assert sink.steps_of("r3") == [2, 4, 6]


def test_the_policy_is_asked_with_what_was_measured(model: StagedModel) -> None:
    asked: list[tuple[float, float]] = []

    def never(row_step_s: float, export_s: float) -> None:
        asked.append((row_step_s, export_s))

    sink = Sink()
    model.before.append(lambda stage, _ids: time.sleep(0.02) if stage == "denoise" else None)
    with Exporting(model.loaded, sink, never) as running:
        gate = model.gate("denoise", "r4")
        running.submit(BY_ID["r4"], BY_ID["r3"])
        gate.await_reached()
        until(lambda: all(running.runner._live.get(key) for key in ("r3", "r4")))
        gate.open()
        running.events.end_of("r4")
    assert asked
    assert sink.kept == []
    for row_step_s, export_s in asked:
        assert row_step_s >= 0.01
        # what the sink said, and a copy in the step thread
        assert export_s > 1.0


def test_an_aborted_row_is_not_wanted_and_one_in_flight_is(model: StagedModel) -> None:
    sink = Sink()
    gate = model.gate("denoise", "r4", call=4)
    with Exporting(model.loaded, sink, lambda *_: 2) as running:
        running.submit(BY_ID["r4"])
        gate.await_reached()
        ((_, is_wanted),) = [pair for pair in sink.kept if pair[0].step_index == 4]
        assert is_wanted()
        running.runner.abort("r4")
        assert not is_wanted()
        gate.open()
        until(lambda: len(running.runner._engine) == 0)
    assert sink.steps_of("r4") == [2, 4]


def test_a_copy_that_fails_costs_only_itself(
    model: StagedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink()

    def fail(_state: RequestState) -> None:
        raise torch.OutOfMemoryError("no room for a copy")

    monkeypatch.setattr(RequestState, "copy", fail)
    with Exporting(model.loaded, sink, lambda *_: 1) as running:
        running.submit(BY_ID["r1"])
        running.events.pixels_of("r1")
    assert "no room for a copy" in caplog.text
    assert sink.kept == []
