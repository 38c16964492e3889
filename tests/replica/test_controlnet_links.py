"""Both ends of the ControlNet service over every kind of link, in one process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

import pytest
import torch

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.engine.controlnets.bank import Bank, ControlNetBank
from ray_cluster.engine.controlnets.loading import load_controlnet
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import RequestFailed
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.transport.connecting import Listener, connect, listen
from ray_cluster.transport.in_process import pair
from ray_cluster.transport.links import Link, LinkKind, LinkLimits, LinkRefused
from tests.replica.controlnet_bank import (
    NAME,
    PATIENCE_S,
    RandomBank,
    ask_of,
    directory,
    expected,
    is_same,
    peer_of,
)
from tests.transport.harness import KINDS


class Service:
    """A server, and base models' replicas that ask it."""

    def __init__(self, bank: Bank, kind: LinkKind = "in-process", max_batch: int = 8) -> None:
        self.bank = bank
        self.server = ControlNetServer(NAME, bank, max_batch=max_batch, clock=time.monotonic)
        self._kind = kind
        self.limits = LinkLimits()
        self.links: list[Link] = []
        self._listener: Listener | None = None
        self.clients: list[RemoteControlNets] = []
        self.num_ready = 0
        if kind != "in-process":
            self._listener = listen("127.0.0.1", self.server.accept)

    def client(self) -> RemoteControlNets:
        client = RemoteControlNets(
            clock=time.monotonic, on_ready=self._count, connector=self._connect, patience_s=0.2
        )
        client.set_peers(directory(peer_of("here:1", "secret", "r1"), peer_of("x", "", "o", "no")))
        self.clients.append(client)
        return client

    def close(self) -> None:
        for one in self.clients:
            one.close()
        self.server.stop()
        if self._listener is not None:
            self._listener.close()

    def _connect(self, target: str, _secret: str) -> Link:
        assert target == "here:1", "only ControlNets that were asked for are connected"
        if self._listener is None:
            link, there = pair(self.limits)
            self.server.accept(there)
        else:
            shares_memory = self._kind == "shared-memory"
            listener = self._listener
            link = connect(
                listener.target, listener.secret, limits=self.limits, shares_memory=shares_memory
            )
        assert link.kind == self._kind
        self.links.append(link)
        return link

    def _count(self) -> None:
        self.num_ready += 1


@contextlib.contextmanager
def served(
    bank: Bank | None = None, kind: LinkKind = "in-process", max_batch: int = 8
) -> Iterator[Service]:
    with contextlib.closing(
        Service(RandomBank() if bank is None else bank, kind, max_batch)
    ) as service:
        service.server.start()
        yield service


def _result(future: Future[RowResiduals]) -> RowResiduals:
    return future.result(PATIENCE_S)


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, "it has not come to it"
        time.sleep(0.01)


def _values(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric by its labels' values."""
    return {
        tuple(value for _, value in labels): value
        for family in snapshot
        for (sample, labels), value in family.samples.items()
        if sample == f"ray_cluster_control_{name}"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_come_bit_for_bit_whoever_asks_and_in_whatever_company(kind: LinkKind) -> None:
    bank = RandomBank()
    with served(bank, kind) as service:
        clients = [service.client() for _ in range(2)]
        # what the step thread has is made in this mode
        with torch.inference_mode():
            for step in range(4):
                asks = [
                    [ask_of(7 * number + one, step=step) for one in range(5)] for number in (0, 1)
                ]
                futures = [client.ask(own) for client, own in zip(clients, asks, strict=True)]
                for own, found in zip(asks, futures, strict=True):
                    for ask, future in zip(own, found, strict=True):
                        assert is_same(_result(future), expected(ask))
        _until(lambda: service.num_ready == 40)
        assert all(len(batch) <= 8 for batch in bank.batches)
        assert clients[0].usual_s(NAME) > 0
        assert clients[0].usual_s("depth") == 0
        snapshot, server = clients[0].metrics(), service.server.metrics()
        assert _values(snapshot, "asks_total") == {(NAME, "answered"): 20}
        assert _values(snapshot, "answer_seconds_count") == {(NAME, kind): 20}
        assert _values(server, "rows_total") == {(NAME, "computed"): 40}
        assert _values(server, "links") == {(NAME, kind): 2}
        carried = _values(snapshot, "bytes_total")
        assert carried[NAME, "received", kind] > 20 * (64 * 64 * 8)
        assert 0 < carried[NAME, "sent", kind] < carried[NAME, "received", kind]
        for client in clients:
            for seed in range(12):
                client.forget(ask_of(seed).key)
        _until(lambda: not any(service.bank.knows(key) for key in _keys(service)))


def _keys(service: Service) -> list[str]:
    assert isinstance(service.bank, RandomBank)
    return [key for batch in service.bank.batches for key in batch]


def test_the_latents_may_change_while_a_step_is_asked_for() -> None:
    with served(RandomBank(delay_s=0.05)) as service:
        client = service.client()
        ask = ask_of(1)
        wanted = expected(ask)
        (future,) = client.ask([ask])
        ask.latents.zero_()
        assert is_same(_result(future), wanted)


def test_requests_that_are_dropped_are_opened_again() -> None:
    with served(RandomBank(max_kept=1)) as service:
        client = service.client()
        for step in range(5):
            asks = [ask_of(seed, step=step) for seed in range(3)]
            for ask, future in zip(asks, client.ask(asks), strict=True):
                assert is_same(_result(future), expected(ask))
        assert _values(client.metrics(), "retries_total")[NAME, "unknown"] > 0


def test_a_row_that_cannot_be_computed_fails_its_request_alone() -> None:
    with served() as service:
        client = service.client()
        asks = [ask_of(seed, step=2000 if seed == 1 else 0) for seed in range(3)]
        futures = client.ask(asks)
        with pytest.raises(RequestFailed, match="a timestep below 0") as caught:
            _result(futures[1])
        assert caught.value.stage == "control"
        for index in (0, 2):
            assert is_same(_result(futures[index]), expected(asks[index]))
        assert _values(client.metrics(), "asks_total") == {
            (NAME, "answered"): 2,
            (NAME, "failed"): 1,
        }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_for_a_link_fails_its_request_alone(kind: LinkKind) -> None:
    with served(kind=kind) as service:
        # an open and a step fit, the residuals do not
        service.limits = LinkLimits(20_000, 20_000)
        client = service.client()
        (future,) = client.ask([ask_of(1)])
        with pytest.raises(RequestFailed, match="max_message_bytes"):
            _result(future)
        service.limits = LinkLimits(600, 600)
        client = service.client()
        (future,) = client.ask([ask_of(1)])
        with pytest.raises(RequestFailed):
            _result(future)


def test_cancelled_steps_are_dropped_and_their_room_is_given_back() -> None:
    with served(RandomBank(delay_s=0.02), "shared-memory") as service:
        client = service.client()
        _result(client.ask([ask_of(3)])[0])
        for step in range(30):
            kept, given_up = client.ask([ask_of(1, step=step), ask_of(2, step=step)])
            given_up.cancel()
            _result(kept)
        (link,) = service.links
        _until(lambda: link.traffic.num_received == 61)
        assert given_up.cancelled()


def test_a_link_that_breaks_is_made_again_and_its_steps_are_repeated() -> None:
    with served(RandomBank(delay_s=0.1), "tcp") as service:
        client = service.client()
        for step in range(3):
            asks = [ask_of(seed, step=step) for seed in range(3)]
            futures = client.ask(asks)
            _until(lambda step=step: len(service.links) > step)  # type: ignore[misc]
            service.links[-1].close()
            for ask, future in zip(asks, futures, strict=True):
                assert is_same(_result(future), expected(ask))
        # a client that is gone leaves nothing
        client.close()
        _until(lambda: not any(service.bank.knows(key) for key in _keys(service)))
        assert _values(service.server.metrics(), "links") == {(NAME, "tcp"): 0}


def test_a_client_that_sends_what_is_no_message_is_closed_and_others_go_on() -> None:
    with served() as service:
        client = service.client()
        (future,) = client.ask([ask_of(1)])
        _result(future)
        for head in (b"", b"nonsense", b"\xff" * 100):
            link, there = pair()
            service.server.accept(there)
            link.send(head)
            with pytest.raises(Exception, match="closed"):
                link.receive()
        ask = ask_of(1, step=1)
        assert is_same(_result(client.ask([ask])[0]), expected(ask))


def test_nobody_serves_it_and_the_request_says_so_after_its_patience() -> None:
    def refuse(_target: str, _secret: str) -> Link:
        raise LinkRefused("nobody listens")

    client = RemoteControlNets(
        clock=time.monotonic, on_ready=lambda: None, connector=refuse, patience_s=0.1
    )
    client.set_peers(directory(peer_of("here:1", "secret", "r1")))
    (future,) = client.ask([ask_of(1, deadline_s=0.0)])
    with pytest.raises(RequestFailed, match="0 of its replicas are connected"):
        _result(future)
    client.close()


def test_a_worker_whose_device_is_lost_reports_it_and_closes_its_links() -> None:
    ended = threading.Event()

    class LostBank(RandomBank):
        def compute(self, rows: object) -> list[RowResiduals]:  # type: ignore[override]
            raise RuntimeError("CUDA error: device-side assert triggered")

    with served(LostBank()) as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _arguments: ended.set())
        service.server.check_alive(60.0)
        client = service.client()
        (future,) = client.ask([ask_of(1, deadline_s=0.0)])
        assert ended.wait(PATIENCE_S)
        with pytest.raises(RuntimeError, match="has died: the device is lost"):
            service.server.check_alive(60.0)
        with pytest.raises(RequestFailed):
            _result(future)


def test_a_batch_that_hangs_is_reported() -> None:
    now_s = [0.0]
    going_on, begun = threading.Event(), threading.Event()

    class HangingBank(RandomBank):
        def compute(self, rows: object) -> list[RowResiduals]:  # type: ignore[override]
            begun.set()
            assert going_on.wait(PATIENCE_S)
            return super().compute(rows)  # type: ignore[arg-type]

    server = ControlNetServer(NAME, HangingBank(), max_batch=2, clock=lambda: now_s[0])
    server.start()
    link, there = pair()
    server.accept(there)
    client = RemoteControlNets(
        clock=time.monotonic, on_ready=lambda: None, connector=lambda _target, _secret: link
    )
    client.set_peers(directory(peer_of("here:1", "secret", "r1")))
    futures = client.ask([ask_of(1)])
    assert begun.wait(PATIENCE_S)
    now_s[0] = 61.0
    with pytest.raises(RuntimeError, match=r"computed for 61\.0 s"):
        server.check_alive(60.0)
    going_on.set()
    wait(futures, PATIENCE_S)
    _until(lambda: _is_alive(server))
    server.stop()
    client.close()


def _is_alive(server: ControlNetServer) -> bool:
    try:
        server.check_alive(60.0)
    except RuntimeError:
        return False
    return True


def _real_ask(seed: int, timestep: float) -> ControlNetAsk:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randn(2, 12, 64, generator=generator)
    px = 64 + 32 * (seed % 2)
    return ControlNetAsk(
        name=NAME,
        key=f"{seed}/0",
        conditioning=Conditioning(prompts[0], prompts[1] if seed % 3 else None),
        map=torch.randint(0, 256, (px, 64, 3), dtype=torch.uint8, generator=generator),
        latents=torch.randn(4, px // 4, 16, generator=generator),
        timestep=timestep,
        deadline_s=time.monotonic() + 3600,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_controlnet_elsewhere_makes_what_it_makes_here(kind: LinkKind) -> None:
    model = load_controlnet("shapes-sd-edges", torch.device("cpu"))
    bank, here = (ControlNetBank(model, max_bytes=2**26) for _ in range(2))
    # a batch of one each, and one thread: what is compared is the way there and back
    prepare_threads(1)
    with served(bank, kind, max_batch=1) as service, torch.inference_mode():
        client, local = service.client(), LocalControlNets({NAME: here})
        for timestep in (999.0, 500.0):
            asks = [_real_ask(seed, timestep) for seed in range(4)]
            # all of them first: both ends have the same weights, which one thread calls at a time
            answers = [_result(future) for future in client.ask(asks)]
            for ask, answer in zip(asks, answers, strict=True):
                (wanted,) = local.ask([ask])
                assert is_same(answer, wanted.result())
