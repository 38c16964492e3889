"""Which signals count as a stop, and which as a second one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ray_cluster.cli.service import signals
from ray_cluster.cli.service.signals import StopSignals


@pytest.fixture
def armed() -> Iterator[StopSignals]:
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopSignals(with_hangup=True) as one:
        one.arm()
        yield one
    signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_same_signal_twice_at_once_is_one_stop(armed: StopSignals, kind: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(kind)
    signal.raise_signal(kind)


def test_a_later_signal_is_a_second_stop_but_for_the_terminal_closing(
    armed: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_SAME_STOP_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(with_hangup=True) as one:
            one.arm()
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_signal_before_arming_waits_for_it() -> None:
    with StopSignals() as one:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            one.arm()
