"""Errors that nobody expected, in a ControlNet's worker and on the links to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from ray_cluster.engine.controlnets.bank import BankRow
from ray_cluster.replica.controlnet.batches import ControlNetBatches, WaitingRow
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.controlnet.metrics import ControlNetServerMetrics
from tests.engine.staged import until as until_so
from tests.replica.controlnet_bank import NAME, PATIENCE_S, RandomBank, ask_of, expected, is_same
from tests.replica.test_controlnet_links import Service, served
from tests.replica.test_unexpected import SECRET, odd


def test_a_row_of_a_controlnet_that_fails_oddly_is_refused_alone() -> None:
    """The computing thread would have died, and with it each replica that the row came to."""
    bank, metrics = RandomBank(), ControlNetServerMetrics(NAME)
    batches = ControlNetBatches(NAME, bank, max_batch=8, clock=lambda: 0.0, metrics=metrics)
    real_open, real_compute = bank.open, bank.compute

    def open_it(key: str, conditioning: Any, control_map: Tensor) -> None:
        if "request-1/" in key:
            odd()
        real_open(key, conditioning, control_map)

    def compute(rows: Sequence[BankRow]) -> Any:
        if any("request-2/" in row.key for row in rows):
            odd()
        return real_compute(rows)

    bank.open, bank.compute = open_it, compute  # type: ignore[method-assign]
    for seed in range(4):
        ask = ask_of(seed)
        batches.open(7, ask.key, ask.conditioning, ask.map)
        batches.step([WaitingRow(7, seed, ask.key, ask.latents, ask.timestep, 0.0)])
    answers = {one.row.call: one for one in batches.compute()}
    for seed in (1, 2):
        assert "unexpected Odd" in str(answers[seed].refusal)
        assert SECRET not in str(answers[seed].refusal)
    assert answers[0].residuals is not None
    assert answers[3].residuals is not None


def asked(client: RemoteControlNets, seed: int = 1) -> None:
    """Ask, and check the answer."""
    ask = ask_of(seed)
    (future,) = client.ask([ask])
    assert is_same(future.result(PATIENCE_S), expected(ask))


def test_residuals_that_cannot_be_framed_are_refused_and_the_next_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served() as service:
        client = service.client()
        asked(client)
        with monkeypatch.context() as patch:
            patch.setattr("ray_cluster.replica.controlnet.server.framed", odd)
            (future,) = client.ask([ask_of(1)])
            assert "cannot be sent: Odd" in str(future.exception(PATIENCE_S))
        asked(client)
        service.server.check_alive(60.0)


@pytest.mark.parametrize("end", ["connector", "reading", "sending", "looking"])
def test_links_to_a_controlnet_outlive_odd_errors(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would have connected, sent, or looked after the calls any more."""
    monkeypatch.setattr("ray_cluster.replica.controlnet.client._REST_S", 0.01)
    failed = threading.Event()

    def once(
        real: Callable[..., Any], is_it: Callable[[Any], bool] = lambda _args: True
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not failed.is_set():
                failed.set()
                odd()
            return real(*args, **options)

        return call

    with served() as service:
        if end == "connector":
            service._connect = once(service._connect)  # type: ignore[method-assign]
        client = service.client()
        if end == "reading":
            client._take = once(client._take)  # type: ignore[method-assign]
        elif end == "sending":
            asked(client)
            client._carry_out = once(  # type: ignore[method-assign]
                client._carry_out, lambda args: args[1][0].what == "step"
            )
            (future,) = client.ask([ask_of(2)])
            assert SECRET not in str(future.exception(PATIENCE_S))
        elif end == "looking":
            client._calls.check = once(client._calls.check)  # type: ignore[method-assign]
        asked(client)
        until_so(failed.is_set)
        asked(client, 3)
        assert _alive(client) >= 2


def _alive(client: RemoteControlNets) -> int:
    return sum(thread.is_alive() for thread in client._threads)


@pytest.mark.parametrize("end", ["_task", "sending"])
def test_a_link_whose_worker_fails_oddly_is_closed_and_made_anew(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as service:
        client = service.client()
        asked(client)
        if end == "_task":
            real = service.server._task
            monkeypatch.setattr(service.server, "_task", odd)
        else:
            link: Any = next(iter(service.server._clients.values())).link
            monkeypatch.setattr(link, "send", odd)
        (future,) = client.ask([ask_of(2)])
        until_so(lambda: _is_closed(service))
        if end == "_task":
            monkeypatch.setattr(service.server, "_task", real)
        assert is_same(future.result(PATIENCE_S), expected(ask_of(2)))


def _is_closed(service: Service) -> bool:
    return len(service.links) > 1
