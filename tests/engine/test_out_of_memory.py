"""Batches that run out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ray_cluster.engine.batch_caps import BatchCaps
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.step_costs import StepCosts
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.failing import FailsWith
from tests.engine.harness import (
    RUN_TOLERANCE,
    difference,
    drive,
    engine_of,
    request,
    run_alone,
    start_all,
)

Record = Callable[[str, object], None]

# --- memory that runs out ---


class RoomFor(FailsWith):
    """Runs out of memory with more than so many rows, or with a certain row."""

    def __init__(self, inner: Any, room: int, marked: Any = None) -> None:
        super().__init__(inner, torch.OutOfMemoryError("CUDA out of memory"), marked, [])
        self.room = room

    def encode_half(self, batch: Any) -> Any:
        if len(batch.prepared) > self.room:
            self.sizes.append(len(batch.prepared))
            raise self._error
        return super().encode_half(batch)


def engine_with_caps(zoo: Zoo, executor: Any, caps: BatchCaps) -> Any:
    model = replace(zoo.model("sd"), executor=executor, max_batch_by_size=caps)
    return build_engine(model, max_batch=8, clock=lambda: 0.0)


def test_a_batch_that_runs_out_of_memory_is_not_tried_again_at_that_size(
    zoo: Zoo, caplog: pytest.LogCaptureFixture, record: Record
) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i) for i in range(8)]
    executor, caps = RoomFor(model.executor, 3), BatchCaps({(64, 64): 8, (128, 128): 4})
    with caplog.at_level(logging.WARNING):
        run = drive(engine_with_caps(zoo, executor, caps), {0: start_all(model, requests)})
    assert not run.failed
    # the first step finds out; nothing larger than what ran then is tried again
    assert executor.sizes[:7] == [8, 4, 2, 2, 4, 2, 2]
    assert set(executor.sizes[7:]) == {2}
    assert caps == {(64, 64): 2, (128, 128): 2}
    assert "batches of 64x64 are capped at 2" in caplog.text
    errors = [difference(run.latents(one.request_id), run_alone(model, one)) for one in requests]
    record("after running out of memory", max(errors))
    assert max(errors) <= RUN_TOLERANCE


def test_one_request_that_needs_too_much_fails_alone_and_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = RoomFor(model.executor, 8, states[2].conditioning)
    run = drive(engine_with_caps(zoo, executor, caps), {0: states})
    assert run.failed.keys() == {"r2"}
    assert run.finished.keys() == {"r0", "r1", "r3"}
    assert caps == {(64, 64): 8}
    assert executor.sizes[5:] == [3] * 5


def test_any_other_error_of_a_batch_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = FailsWith(model.executor, RuntimeError("once"), states[0].conditioning, [1])
    assert not drive(engine_with_caps(zoo, executor, caps), {0: states}).failed
    assert caps == {(64, 64): 8}


def test_a_lowered_cap_holds_for_larger_sizes_and_not_for_planned_smaller_ones() -> None:
    caps = BatchCaps({(64, 64): 8, (96, 96): 6, (128, 128): 4})
    caps.lower([(80, 80)] * 5)
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 5, 4]
    caps.lower([(96, 96)])
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 1, 1]
    caps.lower([(96, 96)] * 7)
    assert caps[96, 96] == 1


def test_a_lowered_cap_rises_by_one_after_so_many_full_batches() -> None:
    caps = BatchCaps({(64, 64): 5, (128, 128): 4}, quiet_batches=3)
    caps.lower([(64, 64)] * 2)
    for batch in (2, 1, 2, 1):
        caps.confirm([(64, 64)] * batch)
    assert caps[64, 64] == 2, "batches that are not full prove nothing"
    caps.confirm([(64, 64)] * 2)
    assert caps == {(64, 64): 3, (128, 128): 2}
    for _ in range(2):
        caps.confirm([(64, 64)] * 3)
    caps.lower([(64, 64)] * 3)
    for _ in range(2):
        caps.confirm([(64, 64)] * 3)
    assert caps[64, 64] == 3, "the time without an error starts again"
    for _ in range(20):
        caps.confirm([(64, 64)] * caps[64, 64])
    assert caps == {(64, 64): 5, (128, 128): 2}, "never above the plan"


def test_a_size_that_was_not_planned_raises_no_larger_ones_cap() -> None:
    caps = BatchCaps({(64, 64): 8, (128, 128): 4}, quiet_batches=2)
    caps.lower([(128, 128)])
    assert caps[80, 80] == 1
    for _ in range(20):
        caps.confirm([(80, 80)] * caps[80, 80])
    assert (caps[80, 80], caps[128, 128]) == (4, 1)


def test_the_engine_tries_larger_batches_again_once_there_is_room(zoo: Zoo) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", seed=i, num_steps=16) for i in range(4)]
    executor, caps = RoomFor(model.executor, 2), BatchCaps({(64, 64): 4}, quiet_batches=4)
    engine = engine_with_caps(zoo, executor, caps)
    for state in start_all(model, requests):
        engine.add(state)
    with torch.inference_mode():
        for _ in range(5):
            engine.step()
        assert executor.sizes == [4, 2, 2, *[2] * 4]
        assert caps == {(64, 64): 3}
        # one try that fails; its halves do not count as full batches
        engine.step()
        assert executor.sizes[7:] == [3, 2, 1]
        assert caps == {(64, 64): 2}
        executor.room = 4
        for _ in range(9):
            engine.step()
    assert executor.sizes[10:] == [*[2] * 4, *[3] * 4, 4]
    assert caps == {(64, 64): 4}


def test_a_step_whose_memory_ran_out_says_nothing_of_what_steps_take(zoo: Zoo) -> None:
    model = zoo.model("sd")
    executor, caps, ticks = RoomFor(model.executor, 2), BatchCaps({(64, 64): 4}), [0.0]
    model = replace(model, executor=executor, max_batch_by_size=caps)

    def clock() -> float:
        """A second passes with every look at it."""
        ticks[0] += 1
        return ticks[0]

    costs = StepCosts()
    engine = build_engine(model, max_batch=4, clock=clock, costs=costs)
    for state in start_all(model, [request(f"r{i}", seed=i) for i in range(4)]):
        engine.add(state)
    before = costs.current
    with torch.inference_mode():
        engine.step()
        assert executor.sizes == [4, 2, 2]
        assert costs.current == before
        engine.step()
    assert costs.current != before


def test_memory_of_a_failed_call_is_free_before_the_next_try(zoo: Zoo) -> None:
    """An exception's traceback keeps the call's tensors: the retry must come after it is gone."""
    import weakref

    inner = zoo.model("sd").executor
    alive: list[weakref.ref[Any]] = []
    seen: list[int] = []

    class Hungry(FailsWith):
        def encode_half(self, batch: Any) -> Any:
            seen.append(sum(one() is not None for one in alive))
            activations = torch.zeros(1000)
            alive.append(weakref.ref(activations))
            if len(batch.prepared) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner.encode_half(batch)

    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", num_steps=1) for i in range(4)])
    engine = engine_of(model, executor=Hungry(inner, ValueError(), None, []))
    assert not drive(engine, {0: states}).failed
    assert seen == [0] * 7
