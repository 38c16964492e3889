"""A runner can be emptied at any moment without losing anything, and says when it is broken."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ray_cluster.engine.stages.events import Decoded, Stepped
from ray_cluster.engine.step.state import RequestState
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.harness import PIXEL_TOLERANCE, pixel_difference, request, start
from tests.engine.staged import Running, StagedModel, StageName, until

REQUESTS = [
    request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i, num_steps=3 + i) for i in range(7)
]
BY_ID = {one.request_id: one for one in REQUESTS}
STAGES: tuple[StageName, ...] = ("encode", "denoise", "decode")


@pytest.fixture(scope="module")
def staged(zoo: Zoo) -> StagedModel:
    return StagedModel(zoo.model("sd"), REQUESTS)


@pytest.fixture(scope="module")
def pixels(staged: StagedModel) -> dict[str, Any]:
    return dict(staged.pixels())


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    yield from staged.lent()


def go_on(model: StagedModel, exported: Sequence[Any], pixels: dict[str, Any]) -> list[str]:
    """Finish in another runner what was taken out of one; return the ids."""
    with Running(model.inner) as second:
        for item in exported:
            state = item.state
            if state is not None:
                state = RequestState.from_bytes(
                    state.to_bytes(), device=second.runner.device, arrival_s=0.0, deadline_s=1e12
                )
            second.runner.submit(item.request, deadline_s=1e12, state=state)
        for item in exported:
            key = item.request.request_id
            assert pixel_difference(second.events.pixels_of(key), pixels[key]) <= PIXEL_TOLERANCE
        return second.events.ended_ids


@pytest.mark.parametrize("seed", range(3))
def test_emptying_a_runner_at_a_random_moment_loses_and_doubles_nothing(
    model: StagedModel, pixels: dict[str, Any], seed: int
) -> None:
    """Six steps of seven requests, several of them finished, decoded or not encoded yet."""
    moment = random.Random(seed).randrange(1, 14)
    with Running(model.loaded, max_batch=3) as running:
        running.submit(*REQUESTS)
        until(lambda: len(model.calls) >= moment, "the moment")
        exported = running.runner.export_all()
        done = list(running.events.ended_ids)
        assert running.runner.num_in_flight == 0
        time.sleep(0.05)
        assert running.events.ended_ids == done
    moved = go_on(model, exported, pixels)
    assert sorted([*done, *moved]) == sorted(BY_ID)


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_taken_out_of_any_stage_is_finished_elsewhere(
    model: StagedModel, pixels: dict[str, Any], stage: StageName
) -> None:
    gate = model.gate(stage, "r2", call=2 if stage == "denoise" else 0)
    with Running(model.loaded) as running:
        running.submit(BY_ID["r2"])
        gate.await_reached()
        if stage == "denoise":
            # it can be taken out only between two steps
            model.before.append(lambda *_: time.sleep(0.01))
            gate.open()
        (exported,) = running.runner.export_all()
        gate.open()
        num_done = {"encode": None, "decode": BY_ID["r2"].num_steps}
        if stage != "denoise":
            done = exported.state.step_index if exported.state else None
            assert done == num_done[stage]
        else:
            assert exported.state is not None
            assert exported.state.step_index >= 3
        until(lambda: len(running.events.ends) == 0)
    assert go_on(model, [exported], pixels) == ["r2"]


def test_what_was_only_to_be_decoded_takes_no_step_more(
    model: StagedModel, pixels: dict[str, Any]
) -> None:
    one = BY_ID["r4"]
    state = start(model.inner, one)
    state.latents, state.step_index = model.final["r4"], one.num_steps
    with Running(model.loaded) as running:
        running.runner.submit(one, deadline_s=1e12, state=state)
        assert pixel_difference(running.events.pixels_of("r4"), pixels["r4"]) <= PIXEL_TOLERANCE
        assert [stage for stage, _ in model.calls] == ["decode"]


def test_the_state_of_another_request_is_not_taken(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        with pytest.raises(ValueError, match="the state given for"):
            running.runner.submit(
                BY_ID["r1"], deadline_s=1e12, state=start(model.inner, BY_ID["r2"])
            )
        assert running.runner.num_in_flight == 0


def test_steps_are_batched_and_stages_overlap(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        running.submit(*REQUESTS)
        for one in REQUESTS:
            running.events.end_of(one.request_id)
    steps = [ids for stage, ids in model.calls if stage == "denoise"]
    assert max(map(len, steps)) >= 5
    assert len(steps) < sum(one.num_steps for one in REQUESTS) / 2
    decodes = [index for index, (stage, _) in enumerate(model.calls) if stage == "decode"]
    assert decodes[0] < len(model.calls) - len(decodes)
    reports = [event.report for event in running.events.all if isinstance(event, Stepped)]
    assert sum(len(report.stepped) for report in reports) == sum(one.num_steps for one in REQUESTS)


def test_the_times_of_the_stages_add_up(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        started_s = time.monotonic()
        running.runner.submit(BY_ID["r3"], deadline_s=1e12, queued_s=2.5)
        end = running.events.end_of("r3")
        passed_s = time.monotonic() - started_s
    assert isinstance(end, Decoded)
    timing = end.timing
    assert timing.queue_s == 2.5
    assert min(timing.encode_s, timing.denoise_s, timing.decode_s) > 0
    assert timing.encode_s + timing.denoise_s + timing.decode_s <= passed_s


# --- signs of life ---


class NobodyExpectsThis(Exception):
    """None of the errors that belong to one request."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_found_and_named(model: StagedModel, stage: StageName) -> None:
    def hook(at: StageName, _ids: Sequence[str]) -> None:
        if at == stage:
            raise NobodyExpectsThis

    model.before.append(hook)
    with Running(model.loaded) as running:
        running.runner.check_alive(60.0)
        running.submit(REQUESTS[0])
        until(lambda: not _is_alive(running, 60.0))
        with pytest.raises(RuntimeError, match=f"the {stage} thread has died"):
            running.runner.check_alive(60.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_hanging_thread_is_found_and_named(model: StagedModel, stage: StageName) -> None:
    gate = model.gate(stage, "r0")
    now_s = [0.0]
    with Running(model.loaded, clock=lambda: now_s[0]) as running:
        running.submit(REQUESTS[0])
        gate.await_reached()
        running.runner.check_alive(60.0)
        now_s[0] = 61.0
        if stage != "denoise":
            # the step thread is idle, and shows that it lives twice a second
            until(lambda: _names(running) != "denoise")
        assert _names(running) == stage
        gate.open()
        until(lambda: _is_alive(running, 60.0))
        assert isinstance(running.events.end_of("r0"), Decoded)


def test_an_idle_runner_is_alive_however_long(model: StagedModel) -> None:
    now_s = [0.0]
    with Running(model.loaded, clock=lambda: now_s[0]) as running:
        running.submit(REQUESTS[0])
        running.events.end_of("r0")
        now_s[0] = 1e6
        until(lambda: _is_alive(running, 60.0))


def _is_alive(running: Running, max_silence_s: float) -> bool:
    try:
        running.runner.check_alive(max_silence_s)
    except RuntimeError:
        return False
    return True


def _names(running: Running) -> str:
    """The thread that the check complains of."""
    try:
        running.runner.check_alive(60.0)
    except RuntimeError as error:
        return str(error).split()[1]
    return ""


def test_a_stopped_runner_ends_its_threads_and_tells_nothing_more(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        running.submit(*REQUESTS)
        until(lambda: len(model.calls) >= 3)
    num_events = len(running.events.all)
    with pytest.raises(RuntimeError, match="has died"):
        running.runner.check_alive(60.0)
    time.sleep(0.1)
    assert len(running.events.all) == num_events
