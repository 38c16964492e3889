"""ControlNets in other processes, as a base model's step thread asks them.

The step thread hands messages to sending threads and never waits. Each replica of a ControlNet has
a thread that connects and reads, and while it is connected one that sends; one thread looks after
what takes too long. Who is asked, and when again, is decided in
:mod:`ray_cluster.replica.controlnet.calls`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.errors import RequestFailed
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.controlnets import (
    FROM_CONTROL,
    TO_CONTROL,
    Close,
    FrameSpec,
    Open,
    Refused,
    Residue,
    Step,
    Steps,
    Unknown,
)
from ray_cluster.protocol.leases import Directory, Peer
from ray_cluster.replica.controlnet.calls import Call, Changes, ControlNetCalls, Order
from ray_cluster.replica.controlnet.metrics import ControlNetClientMetrics
from ray_cluster.replica.frames import framed, tensors_of
from ray_cluster.transport.connecting import connect
from ray_cluster.transport.links import Bytes, Link, LinkClosed, LinkRefused, Message

logger = logging.getLogger(__name__)

Connector = Callable[[str, str], Link]
"""Returns a link to a target, given its secret; raises LinkRefused."""

# between two looks, and after one that has failed
_CHECK_S, _REST_S = 0.05, 1.0
_RETRY_S = (0.05, 0.1, 0.3, 1.0, 2.0)


@dataclass(slots=True, eq=False)
class _Service:
    """A replica of a ControlNet, connected or not.

    Attributes:
        is_listed: whether the directory has it; one that is not may finish what it has.
        is_over: set to end its thread.
        link: while it is connected.
        peer_id: of that link; another one with each.
        outbox: of that link; None ends the sending thread.
    """

    peer: Peer
    is_listed: bool = True
    is_over: threading.Event = field(default_factory=threading.Event)
    link: Link | None = None
    peer_id: str = ""
    outbox: SimpleQueue[Sequence[Order] | None] = field(default_factory=SimpleQueue)


class RemoteControlNets:
    """The ControlNets that have workers of their own; see :class:`ControlNetBackend` for what it
    does.

    Only those that were asked for are connected. Residuals come on the CPU.

    Args:
        clock: monotonic seconds, the engine's.
        on_ready: called after each future is set, in another thread; must return quickly.
        patience_s: that a step has at least while nobody serves its ControlNet; after it, its
            request is overdue.
        connector: makes links.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        on_ready: Callable[[], None] = lambda: None,
        patience_s: float = 5.0,
        connector: Connector = connect,
    ) -> None:
        self._clock = clock
        self._on_ready = on_ready
        self._on_overdue: Callable[[str], object] = lambda _request_id: None
        self._connector = connector
        self._metrics = ControlNetClientMetrics()
        self._calls = ControlNetCalls(clock=clock, metrics=self._metrics, patience_s=patience_s)
        self._directory = Directory()
        self._names: set[str] = set()
        self._services: dict[Peer, _Service] = {}
        self._by_peer_id: dict[str, _Service] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._has_calls = threading.Event()
        self._is_closed = threading.Event()
        self._threads = [threading.Thread(target=self._check_forever, daemon=True)]
        self._threads[0].start()

    def set_peers(self, directory: Directory) -> None:
        """Apply a new directory; from any thread.

        A replica that is not in it any more may answer what it has: a dispatcher that has just
        started does not know everybody yet.
        """
        with self._lock:
            self._directory = directory
            for service in self._services.values():
                service.is_listed = service.peer in directory.peers
                if not service.is_listed and service.link is None:
                    service.is_over.set()
            self._connect_listed()

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        """Begin to compute; see
        :meth:`ray_cluster.engine.controlnets.asks.ControlNetBackend.ask`."""
        # the step goes on with its latents, perhaps in place
        copies = [replace(one, latents=one.latents.detach().cpu().clone()) for one in asks]
        futures, orders = [], list[Order]()
        with self._lock:
            for one in copies:
                if one.name not in self._names:
                    self._names.add(one.name)
                    self._connect_listed()
                call, changes = self._calls.ask(one)
                futures.append(call.future)
                orders += changes.orders
            self._send(orders)
        self._has_calls.set()
        return futures

    def call_when_ready(self, wake: Callable[[], None]) -> None:
        """Have something called after each future that is set; must return quickly."""
        self._on_ready = wake

    def call_when_overdue(self, report: Callable[[str], object]) -> None:
        """Have something called with the id of a request that waits for a ControlNet too long.

        From another thread, and again until the request leaves; it must return quickly.
        """
        self._on_overdue = report

    def forget(self, key: str) -> None:
        """Drop what is kept under a key."""
        with self._lock:
            self._send(self._calls.forget(key).orders)

    def usual_s(self, name: str) -> float:
        """Return the seconds that an answer usually takes."""
        with self._lock:
            return self._calls.usual_s(name)

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot()

    def close(self) -> None:
        """End all links and threads; nothing is answered any more."""
        self._is_closed.set()
        self._has_calls.set()
        with self._lock:
            services, threads = list(self._services.values()), list(self._threads)
            for service in services:
                service.is_over.set()
                if service.link is not None:
                    service.link.close()
        for thread in threads:
            thread.join()

    def _connect_listed(self) -> None:
        """Start threads for the listed replicas of all ControlNets that were asked for."""
        if self._is_closed.is_set():
            return
        for peer in self._directory.peers:
            is_wanted = peer.kind == "control" and peer.name in self._names
            if is_wanted and peer not in self._services:
                service = self._services[peer] = _Service(peer)
                name = f"control-{peer.name}-{peer.replica_id}"
                thread = threading.Thread(
                    target=self._serve, args=(service,), name=name, daemon=True
                )
                self._threads = [one for one in self._threads if one.is_alive()]
                thread.start()
                self._threads.append(thread)

    def _serve(self, service: _Service) -> None:
        """Connect, read until the link ends, and connect again as long as it is listed."""
        peer, failures = service.peer, 0
        while not service.is_over.is_set():
            try:
                link = self._connector(peer.endpoint.target, peer.endpoint.secret)
            except LinkRefused as refused:
                level = logging.WARNING if failures == 0 else logging.DEBUG
                logger.log(level, "ControlNet %s, %s: %s", peer.name, peer.replica_id, refused)
            except Exception:
                # without this thread, nobody would connect to that replica any more
                logger.exception("ControlNet %s, %s is not connected", peer.name, peer.replica_id)
            else:
                self._read(service, link)
                if link.traffic.num_received:
                    failures = 0
                    continue
            # one that comes and goes is no better than one that does not come
            service.is_over.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures += 1
        with self._lock:
            del self._services[peer]
            # it may have been listed again in the meantime
            self._connect_listed()

    def _read(self, service: _Service, link: Link) -> None:
        """Serve a link until it ends."""
        name, outbox = service.peer.name, SimpleQueue[Sequence[Order] | None]()
        sending = threading.Thread(target=self._send_forever, args=(link, outbox), daemon=True)
        with self._lock:
            peer_id = f"{service.peer.replica_id}#{next(self._numbers)}"
            service.link, service.peer_id, service.outbox = link, peer_id, outbox
            self._by_peer_id[peer_id] = service
            self._metrics.connected(name, link)
            if service.is_over.is_set():
                link.close()
            self._send(self._calls.peer_up(peer_id, name).orders)
        sending.start()
        try:
            while True:
                message = link.receive()
                try:
                    self._take(peer_id, link, message)
                finally:
                    message.release()
        except LinkClosed as closed:
            logger.info("ControlNet %s, %s: %s", name, service.peer.replica_id, closed)
        except (ValueError, TypeError) as error:
            logger.warning("ControlNet %s, %s is closed: %s", name, service.peer.replica_id, error)
        except Exception:
            logger.exception("ControlNet %s, %s is closed", name, service.peer.replica_id)
        finally:
            link.close()
            outbox.put(None)
            with self._lock:
                service.link = None
                del self._by_peer_id[peer_id]
                if not service.is_listed:
                    service.is_over.set()
                self._send(self._calls.peer_down(peer_id).orders)
            self._metrics.closed(link)
            sending.join()

    def _take(self, peer_id: str, link: Link, message: Message) -> None:
        """Take an answer; ValueError if it is none."""
        match FROM_CONTROL.decode(message.head):
            case Unknown(number, key):
                self._apply(lambda: self._calls.unknown(peer_id, number, key))
            case Refused(number, text):
                with self._lock:
                    ended = self._calls.answered(peer_id, number)
                if ended is not None:
                    self._fail(ended.call, RequestFailed(text, "control"))
            case Residue(number, specs):
                with self._lock:
                    ended = self._calls.answered(peer_id, number)
                if ended is not None and ended.call.future.set_running_or_notify_cancel():
                    self._metrics.took(ended.call.ask.name, link, ended.took_s)
                    self._finish(ended.call, specs, message)

    def _finish(self, call: Call, specs: Sequence[FrameSpec], message: Message) -> None:
        try:
            *down, mid = tensors_of(specs, message.frames).values()
        except Exception as error:  # noqa: BLE001
            # the call was answered: nobody else would set its future
            self._metrics.ended(call.ask.name, "failed")
            why = f"ControlNet {call.ask.name!r} has sent what are no residuals: {error}"
            call.future.set_exception(RequestFailed(why, "control"))
        else:
            self._metrics.ended(call.ask.name, "answered")
            call.future.set_result(RowResiduals(tuple(down), mid))
        self._on_ready()

    def _fail(self, call: Call, error: RequestFailed) -> None:
        if call.future.set_running_or_notify_cancel():
            self._metrics.ended(call.ask.name, "failed")
            call.future.set_exception(error)
            self._on_ready()

    def _apply(self, change: Callable[[], Changes]) -> None:
        with self._lock:
            changes = change()
            self._send(changes.orders)
        for one in changes.failures:
            self._fail(one.call, one.error)
        for call in changes.overdue:
            # a key is the id of a request, a slash, and its use of the ControlNet
            self._on_overdue(call.ask.key.rpartition("/")[0])

    def _send(self, orders: Sequence[Order]) -> None:
        """Hand orders to the sending threads, under the lock, so that they keep their order."""
        by_peer: defaultdict[str, list[Order]] = defaultdict(list)
        for order in orders:
            by_peer[order.peer_id].append(order)
        for peer_id, own in by_peer.items():
            self._by_peer_id[peer_id].outbox.put(own)

    def _send_forever(self, link: Link, outbox: SimpleQueue[Sequence[Order] | None]) -> None:
        for orders in iter(outbox.get, None):
            steps = [one for one in orders if one.what == "step"]
            # what they name is opened first; what is closed comes alone
            for part in (*([one] for one in orders if one.what != "step"), steps):
                try:
                    self._carry_out(link, part)
                except LinkClosed:
                    return
                except ValueError as error:
                    self._refuse(part, f"a step cannot be sent: {error}")
                except Exception as error:
                    logger.exception("a step cannot be sent")
                    self._refuse(part, f"a step cannot be sent: {type(error).__name__}")

    def _refuse(self, orders: Sequence[Order], why: str) -> None:
        for one in orders:
            self._refuse_call(one.call, RequestFailed(why, "control"))

    def _refuse_call(self, number: int, error: RequestFailed) -> None:
        self._apply(lambda: self._calls.refuse(number, error))

    def _carry_out(self, link: Link, orders: Sequence[Order]) -> None:
        """Send one message: of steps, or of one other order."""
        now_s, steps, frames = self._clock(), list[Step](), list[Bytes]()
        for order in orders:
            ask = order.ask
            if ask is None:
                link.send(TO_CONTROL.encode(Close(order.key)))
            elif order.what == "open":
                opened = framed({**ask.conditioning.tensors(), "map": ask.map})
                link.send(TO_CONTROL.encode(Open(order.key, opened.specs)), opened.frames)
            else:
                sent = framed({"latents": ask.latents})
                slack_s = ask.deadline_s - now_s
                steps.append(Step(order.call, order.key, ask.timestep, slack_s, sent.specs[0]))
                frames += sent.frames
        if steps:
            link.send(TO_CONTROL.encode(Steps(tuple(steps))), frames)

    def _check_forever(self) -> None:
        while not self._is_closed.is_set():
            self._has_calls.wait()
            try:
                self._check()
            except Exception:
                # without this thread, no step of any request is asked of another one
                logger.exception("calls of ControlNets are not looked after")
                self._is_closed.wait(_REST_S)
            self._is_closed.wait(_CHECK_S)

    def _check(self) -> None:
        self._apply(self._calls.check)
        with self._lock:
            if not self._calls:
                self._has_calls.clear()
            for service in self._by_peer_id.values():
                if not service.is_listed and self._calls.is_suspect(service.peer_id):
                    assert service.link is not None, "a connected one has a link"
                    service.link.close()
