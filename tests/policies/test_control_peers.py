"""Which replica of a ControlNet is asked."""

from __future__ import annotations

from ray_cluster.policies.control_peers import PeerView, choose_peer, is_silent


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
