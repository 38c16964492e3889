"""What rows keep of a step: it goes when they go, and what is not there is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ray_cluster.engine.step.reuse_steps import ActivationStore
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.engine.failing import FailsWith
from tests.engine.harness import CONTROL_FACTOR, RUN_TOLERANCE, difference, request
from tests.engine.reusing import Company, Visit

Record = Callable[[str, object], None]


def held(small: Company) -> tuple[StepEngine, ActivationStore]:
    """An engine whose three rows have kept something of a step."""
    store = ActivationStore()
    engine = small.engine(store)
    for index in range(3):
        one = request(f"r{index}", num_steps=6, seed=index, guidance_scale=1.0 + index)
        engine.add(small.state(Visit(one, ReuseSchedule(2, 3))))
    with torch.inference_mode():
        engine.step()
    return engine, store


def test_rows_that_leave_take_their_bytes_with_them(small: Company) -> None:
    engine, store = held(small)
    before = store.num_bytes
    assert before > 0
    # r0 has one model row, the others have two
    engine.abort("r0")
    assert store.num_bytes == before * 4 // 5
    engine.abort("r1")
    assert store.num_bytes == before * 2 // 5
    with torch.inference_mode():
        while len(engine):
            engine.step()
    assert store.num_bytes == 0


def test_a_row_that_fails_leaves_nothing(small: Company) -> None:
    store = ActivationStore()
    state = small.state(Visit(request("bad", num_steps=6), ReuseSchedule(2, 3)))
    executor = FailsWith(small.model.executor, ValueError("bad"), state.conditioning, [2])
    engine = small.engine(store, executor)
    engine.add(state)
    with torch.inference_mode():
        engine.step()
        assert store.num_bytes > 0
        assert engine.step().failed
    assert store.num_bytes == 0


def test_a_model_refuses_a_schedule_that_cuts_where_it_has_nothing(company: Company) -> None:
    last = company.model.executor.num_outer[-1]
    with pytest.raises(ValueError, match=rf"num_outer .* is {last + 1}; allowed .* to {last}"):
        company.engine().add(company.state(Visit(request(), ReuseSchedule(last + 1, 2))))


class Swapped(ActivationStore):
    """Gives every row what its neighbour has kept, or what a row kept first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._first: dict[str, Any] = {}

    def put(self, request_id: str, step_index: int, activations: Any) -> None:
        self._first.setdefault(request_id, activations)
        super().put(request_id, step_index, activations)

    def get(self, request_id: str, step_index: int) -> Any:
        if self._kind == "stale":
            return self._first[request_id]
        return super().get({"r0": "r1", "r1": "r0"}[request_id], step_index)


@pytest.mark.parametrize("kind", ["neighbour's", "stale"])
def test_another_rows_or_an_older_steps_activations_would_show(small: Company, kind: str) -> None:
    some = [Visit(request(f"r{i}", num_steps=6, seed=i), ReuseSchedule(2, 2)) for i in range(2)]
    run = small.run(some, Swapped(kind))
    gaps = [small.gap(visit, run.latents(visit.one.request_id)) for visit in some]
    assert min(gaps) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_a_row_that_moves_to_another_replica_after_any_step_is_as_if_it_had_not(
    company: Company, record: Record
) -> None:
    cut = company.model.executor.num_outer[-1]
    visit = Visit(request("alone", num_steps=6), ReuseSchedule(cut, 3))
    expected, gaps = company.alone(visit.one, visit.reuse), []
    for num_steps in range(1, 6):
        last = company.run_moving(visit, num_steps)
        gaps.append(difference(last.latents, expected))
    record("moved", max(gaps))
    assert max(gaps) <= RUN_TOLERANCE
