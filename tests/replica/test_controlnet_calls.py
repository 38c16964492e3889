"""Who is asked for a step, when somebody else is, and when it fails."""

from __future__ import annotations

import pytest

from ray_cluster.replica.controlnet.calls import Call, Changes, ControlNetCalls
from ray_cluster.replica.controlnet.metrics import ControlNetClientMetrics
from tests.replica.controlnet_bank import NAME, ask_of


class Setup:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.metrics = ControlNetClientMetrics()
        self.calls = ControlNetCalls(clock=lambda: self.now_s, metrics=self.metrics)

    def ask(self, seed: int, *, deadline_s: float = 2000.0) -> Call:
        call, self.last = self.calls.ask(ask_of(seed, deadline_s=deadline_s))
        return call

    def usual(self, took_s: float) -> None:
        """Let answers take so long."""
        self.calls.peer_up("first", NAME)
        for _ in range(3):
            call = self.ask(99)
            self.now_s += took_s
            assert self.calls.answered("first", call.number) is not None

    def retries(self) -> dict[str, float]:
        return {
            dict(labels)["reason"]: value
            for family in self.metrics.snapshot()
            for (name, labels), value in family.samples.items()
            if name == "ray_cluster_control_retries_total"
        }


def _sent(changes: Changes) -> list[tuple[str, str]]:
    return [(one.peer_id, one.what) for one in changes.orders]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_request_is_opened_once_and_stays_where_it_is(setup: Setup) -> None:
    for peer_id in ("a", "b"):
        setup.calls.peer_up(peer_id, NAME)
    setup.calls.peer_up("other", "depth")
    setup.ask(1)
    assert _sent(setup.last) == [("a", "open"), ("a", "step")]
    setup.ask(2)
    assert _sent(setup.last) == [("b", "open"), ("b", "step")]
    for _ in range(3):
        setup.ask(1)
        assert _sent(setup.last) == [("a", "step")]
    setup.ask(3)
    assert _sent(setup.last) == [("b", "open"), ("b", "step")]
    assert _sent(setup.calls.forget(ask_of(1).key)) == [("a", "close")]
    assert _sent(setup.calls.forget(ask_of(1).key)) == []


def test_what_a_peer_does_not_know_is_opened_again_and_not_for_ever(setup: Setup) -> None:
    setup.calls.peer_up("a", NAME)
    call = setup.ask(1)
    for _ in range(8):
        changes = setup.calls.unknown("a", call.number, call.ask.key)
        assert _sent(changes) == [("a", "open"), ("a", "step")]
    (failure,) = setup.calls.unknown("a", call.number, call.ask.key).failures
    assert "max_cached_mib" in str(failure.error)
    assert setup.retries() == {"unknown": 8}
    assert not setup.calls


def test_the_steps_of_a_dead_peer_go_to_another(setup: Setup) -> None:
    setup.calls.peer_up("a", NAME)
    call = setup.ask(1)
    setup.calls.peer_up("b", NAME)
    assert _sent(setup.calls.peer_down("a")) == [("b", "open"), ("b", "step")]
    assert setup.calls.answered("a", call.number) is None
    ended = setup.calls.answered("b", call.number)
    assert ended is not None
    assert ended.call is call
    assert setup.retries() == {"closed": 1}


def test_without_peers_a_step_waits_for_one(setup: Setup) -> None:
    call = setup.ask(1)
    assert _sent(setup.last) == []
    setup.now_s += 900
    assert setup.calls.check().failures == ()
    assert _sent(setup.calls.peer_up("a", NAME)) == [("a", "open"), ("a", "step")]
    setup.calls.peer_down("a")
    assert _sent(setup.calls.peer_up("b", NAME)) == [("b", "open"), ("b", "step")]
    assert setup.calls.answered("b", call.number) is not None


def test_it_fails_at_its_deadline_and_after_five_seconds_at_least(setup: Setup) -> None:
    setup.ask(1, deadline_s=1100.0)
    setup.ask(2, deadline_s=900.0)
    setup.now_s += 4.9
    assert setup.calls.check().failures == ()
    setup.now_s += 0.2
    (late,) = setup.calls.check().failures
    assert late.call.ask.key == ask_of(2).key
    assert (late.error.stage, late.call.number) == ("control", 1)
    assert "ControlNet 'edges'" in str(late.error)
    # applications have the names of their ControlNets
    assert "of the application 'edges' run" in str(late.error)
    # whoever has lost its peer just now gets that time too
    setup.calls.peer_up("a", NAME)
    other = setup.ask(3)
    assert setup.calls.answered("a", other.number) is not None
    setup.now_s += 200
    setup.calls.peer_down("a")
    setup.now_s += 4.9
    assert setup.calls.check().failures == ()
    setup.now_s += 0.2
    assert len(setup.calls.check().failures) == 1
    assert not setup.calls


@pytest.mark.parametrize("slo_s", [60.0, 86400.0])
def test_a_step_without_a_peer_is_overdue_after_five_seconds_whatever_its_deadline(
    setup: Setup, slo_s: float
) -> None:
    setup.calls.peer_up("a", NAME)
    call = setup.ask(1, deadline_s=1000.0 + slo_s)
    setup.now_s += 10
    assert setup.calls.check().overdue == ()
    setup.calls.peer_down("a")
    setup.now_s += 5.1
    changes = setup.calls.check()
    assert (changes.overdue, changes.failures) == ((call,), ())
    # it is asked of a peer that comes before its request has left
    assert _sent(setup.calls.peer_up("b", NAME)) == [("b", "open"), ("b", "step")]
    assert setup.calls.check().overdue == ()


def test_a_peer_that_comes_and_goes_gives_no_more_time(setup: Setup) -> None:
    setup.ask(1, deadline_s=900.0)
    for number in range(10):
        setup.calls.peer_up(str(number), NAME)
        assert setup.calls.check().failures == ()
        setup.now_s += 0.49
        setup.calls.peer_down(str(number))
    setup.now_s += 0.2
    assert len(setup.calls.check().failures) == 1


def test_a_late_request_that_is_being_computed_is_not_given_up(setup: Setup) -> None:
    setup.calls.peer_up("a", NAME)
    setup.ask(1, deadline_s=900.0)
    setup.now_s += 59
    assert setup.calls.check().failures == ()
    setup.now_s += 2
    assert len(setup.calls.check().failures) == 1


def test_another_peer_is_asked_too_when_one_is_silent_and_the_first_answer_counts(
    setup: Setup,
) -> None:
    setup.usual(0.2)
    setup.calls.peer_up("second", NAME)
    call = setup.ask(99)
    assert _sent(setup.last) == [("first", "step")]
    setup.now_s += 1.15
    assert _sent(setup.calls.check()) == []
    setup.now_s += 0.1
    assert _sent(setup.calls.check()) == [("second", "open"), ("second", "step")]
    assert _sent(setup.calls.check()) == []
    # a suspect is not asked
    setup.ask(99)
    assert _sent(setup.last) == [("second", "step")]
    ended = setup.calls.answered("second", call.number)
    assert ended is not None
    assert ended.took_s == 0
    # its answer is dropped, and it is one of them again
    assert setup.calls.answered("first", call.number) is None
    assert not setup.calls.is_suspect("first")
    setup.ask(1)
    assert _sent(setup.last) == [("first", "open"), ("first", "step")]
    assert setup.retries() == {"silent": 1}


def test_the_only_peer_stays_however_silent_and_a_new_one_is_asked_at_once(setup: Setup) -> None:
    setup.usual(0.1)
    setup.ask(99)
    setup.now_s += 10
    assert _sent(setup.calls.check()) == []
    setup.ask(99)
    assert _sent(setup.last) == [("first", "step")]
    setup.calls.peer_up("second", NAME)
    # both: it is a suspect
    assert len(_sent(setup.calls.check())) == 3


def test_cancelled_steps_are_neither_sent_again_nor_failed(setup: Setup) -> None:
    setup.calls.peer_up("a", NAME)
    calls = [setup.ask(seed) for seed in (1, 2, 3)]
    calls[0].future.cancel()
    setup.calls.forget(calls[1].ask.key)
    assert calls[1].future.cancelled()
    changes = setup.calls.peer_down("a")
    assert changes.orders == ()
    assert _sent(setup.calls.peer_up("b", NAME)) == [("b", "open"), ("b", "step")]
    assert setup.calls.answered("b", calls[0].number) is None
    assert len(setup.calls) == 1


def test_the_usual_time_leaves_out_the_first_step_of_a_request(setup: Setup) -> None:
    assert setup.calls.usual_s(NAME) == 0
    setup.calls.peer_up("a", NAME)
    for seed in range(20):
        for took_s in (2.0, 0.1, 0.1, 0.1):
            call = setup.ask(seed)
            setup.now_s += took_s
            setup.calls.answered("a", call.number)
    assert setup.calls.usual_s(NAME) == pytest.approx(0.1, abs=0.01)
