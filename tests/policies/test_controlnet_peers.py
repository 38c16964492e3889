"""Which replica of a ControlNet is asked, and how long others wait for it."""

from __future__ import annotations

import pytest

from ray_cluster.policies.leasing.controlnet_peers import (
    PeerView,
    choose_peer,
    is_silent,
    patience_s,
)


def test_one_that_answers_then_one_that_knows_the_request_then_the_least_busy() -> None:
    idle, busy = PeerView("idle"), PeerView("busy", num_outstanding=5)
    knowing = PeerView("knowing", has_request=True, num_outstanding=9)
    suspect = PeerView("suspect", has_request=True, is_suspect=True)
    assert choose_peer([busy, suspect, idle, knowing]) == "knowing"
    assert choose_peer([suspect, busy, idle]) == "idle"
    assert choose_peer([suspect, busy]) == "busy"
    assert choose_peer([suspect]) == "suspect"
    assert choose_peer([]) is None


def test_silence_is_six_usual_times_and_half_a_second_at_least() -> None:
    assert [is_silent(waited_s, 0.0) for waited_s in (0.5, 0.51)] == [False, True]
    assert [is_silent(waited_s, 0.2) for waited_s in (1.19, 1.21)] == [False, True]


@pytest.mark.parametrize(
    ("usual_s", "all_wait", "seconds"),
    [(0.0, False, 0.05), (0.0, True, 0.25), (0.03, False, 0.09), (0.03, True, 0.25), (1, True, 3)],
)
def test_peers_wait_for_some_usual_answers_and_longer_if_nobody_could_go_on(
    usual_s: float, all_wait: bool, seconds: float
) -> None:
    assert patience_s(usual_s, all_wait=all_wait) == pytest.approx(seconds)
    # who is waited for is not suspected yet
    assert not is_silent(seconds, usual_s)
