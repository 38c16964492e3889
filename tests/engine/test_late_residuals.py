"""Answers of ControlNets that are late, or do not come: who waits, who goes on, who fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache

import pytest
import torch

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.engine.controlnets.local import LocalControlNets, SplitControlNets
from ray_cluster.errors import RequestFailed
from tests.engine.conftest import Zoo
from tests.engine.controlled import CASES, WITH_LORA, Subject, engine_with
from tests.engine.harness import (
    RUN_TOLERANCE,
    difference,
)

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


class Remote:
    """Answers when it is told to."""

    def __init__(self, inner: LocalControlNets) -> None:
        self._inner = inner
        self.is_slow = True
        self.num_asked = 0
        self.forgotten: list[str] = []
        self._open: list[tuple[ControlNetAsk, Future[RowResiduals]]] = []

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        self.num_asked += len(asks)
        futures: list[Future[RowResiduals]] = [Future() for _ in asks]
        self._open += zip(asks, futures, strict=True)
        if not self.is_slow:
            self.answer()
        return futures

    def answer(self, error: Exception | None = None) -> None:
        """Answer all that is outstanding."""
        for ask, future in self._open:
            if not future.set_running_or_notify_cancel():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(self._inner.ask([ask])[0].result())
        self._open = []

    def forget(self, key: str) -> None:
        self.forgotten.append(key)
        self._inner.forget(key)

    def usual_s(self, _name: str) -> float:
        return 0.0


@torch.inference_mode()
def test_rows_whose_residuals_are_late_repeat_their_step_and_no_other_does(
    subjects: Callable[[str], Subject],
) -> None:
    """Every second step is late: all images are what they were, row 2's as fast as ever."""
    subject = subjects("sd15")
    remote = Remote(LocalControlNets(subject.banks()))
    engine = engine_with(subject, remote)
    places = range(len(CASES))
    states = subject.states(places)
    for index, state in zip(places, states, strict=True):
        engine.add(state, subject.adapters.denoiser if index == WITH_LORA else None)
    num_steps, late, ended = 0, 0, {}
    while len(engine):
        remote.is_slow = num_steps % 3 != 2
        report = engine.step()
        num_steps += 1
        assert not report.failed
        late += len(report.late)
        ended |= {state.request.request_id: num_steps for state in report.finished}
        if num_steps % 2 == 0:
            remote.answer()
    errors = [
        difference(state.latents, subject.expected[index])
        for index, state in zip(places, states, strict=True)
    ]
    assert max(errors) <= RUN_TOLERANCE, errors
    assert late >= 8
    # a call more than its steps: its sampler is pndm
    assert ended["r2"] == subject.requests[2].num_steps + 1
    # nothing that was late is asked for twice
    calls = [len(CASES[index]) * (subject.requests[index].num_steps + 1) for index in places]
    assert remote.num_asked <= sum(calls)


@torch.inference_mode()
def test_a_row_that_waits_is_left_out_of_steps(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControlNets(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0, 2]):
        engine.add(state)
    assert engine.step().late == ("r0",)
    assert not engine.is_waiting
    report = engine.step()
    assert (report.stepped, report.late) == (("r2",), ())
    engine.abort("r2")
    assert engine.is_waiting
    assert engine.step().stepped == ()
    remote.answer()
    assert not engine.is_waiting
    assert engine.step().stepped == ("r0",)


@torch.inference_mode()
def test_a_row_without_an_answer_fails_alone(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControlNets(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0, 2]):
        engine.add(state)
    engine.step()
    remote.answer(RequestFailed("nobody serves it", "control"))
    report = engine.step()
    assert [str(row.error) for row in report.failed] == ["control: nobody serves it"]
    assert report.stepped[-1] == "r2"
    assert remote.forgotten == ["r0/0"]


@torch.inference_mode()
def test_an_aborted_row_needs_no_answer(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    remote = Remote(LocalControlNets(subject.banks()))
    engine = engine_with(subject, remote)
    for state in subject.states([0]):
        engine.add(state)
    engine.step()
    engine.abort("r0")
    remote.answer()
    assert len(engine) == 0
    assert remote.forgotten == ["r0/0"]
    # the same request may come back: nothing of its first life is taken for its second one's
    (state,) = subject.states([0])
    engine.add(state)
    remote.is_slow = False
    while len(engine):
        assert not engine.step().failed
    assert difference(state.latents, subject.expected[0]) <= RUN_TOLERANCE


def test_some_run_here_and_some_elsewhere(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks()
    here = LocalControlNets({"0": banks["0"]})
    elsewhere = LocalControlNets({"1": banks["1"], "2": banks["2"]})
    assert max(subject.errors(SplitControlNets(here, elsewhere, frozenset("0")))) <= RUN_TOLERANCE
