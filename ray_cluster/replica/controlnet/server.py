"""The worker of a ControlNet as base models' replicas see it: links in, residuals out.

Each link has a thread that always reads and one that sends, so that neither side ever waits for
the other with full buffers; one thread computes. What of the batches is decided is in
:mod:`ray_cluster.replica.controlnet.batches`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from ray_cluster.engine.controlnets.asks import RowResiduals
from ray_cluster.engine.controlnets.bank import Bank
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.device.streams import StageStream
from ray_cluster.engine.stages.stage_thread import StageThread
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.controlnets import (
    FROM_CONTROL,
    TO_CONTROL,
    Close,
    FromControl,
    Open,
    Refused,
    Residue,
    Step,
    Steps,
    Unknown,
)
from ray_cluster.replica.controlnet.batches import Answer, ControlNetBatches, WaitingRow
from ray_cluster.replica.controlnet.metrics import ControlNetServerMetrics
from ray_cluster.replica.frames import framed, tensors_of
from ray_cluster.transport.links import Bytes, Link, LinkClosed, Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    """A message to a client, which the frames belong to."""

    head: FromControl
    frames: tuple[Bytes, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """A base model's replica.

    Attributes:
        outbox: what is to be sent; None ends the sending thread.
    """

    number: int
    link: Link
    outbox: SimpleQueue[_Reply | None] = field(default_factory=SimpleQueue)


class ControlNetServer:
    """Computes the residuals of one ControlNet for all who are connected.

    Args:
        name: of the ControlNet.
        clock: monotonic seconds.
        device: where the bank computes.
        num_threads: torch threads.
    """

    def __init__(
        self,
        name: str,
        bank: Bank,
        *,
        max_batch: int,
        clock: Callable[[], float],
        device: torch.device | None = None,
        num_threads: int = 1,
    ) -> None:
        self._clock = clock
        self._metrics = ControlNetServerMetrics(name)
        self._batches = ControlNetBatches(
            name, bank, max_batch=max_batch, clock=clock, metrics=self._metrics
        )
        # what the computing thread is to do first
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._numbers = itertools.count()
        self._clients: dict[int, _Client] = {}
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._error: Exception | None = None
        self._busy_since_s: float | None = None
        self._computing = StageThread(
            "control",
            self._compute_forever,
            StageStream(device or torch.device("cpu"), is_urgent=True),
            on_error=self._break,
            num_threads=num_threads,
        )

    @property
    def max_batch(self) -> int:
        """Rows of one model call at most."""
        return self._batches.max_batch

    @max_batch.setter
    def max_batch(self, value: int) -> None:
        self._batches.max_batch = value

    def call(self, work: Callable[[], T]) -> T:
        """Run something in the computing thread before :meth:`start`, such as a warm-up."""
        return self._computing.call(work)

    def start(self) -> None:
        """Begin to compute."""
        self._computing.start()

    def stop(self) -> None:
        """End all threads and links; what is not computed yet is not answered."""
        self._is_stopping.set()
        self._inbox.put(_nothing)
        self._close_links()
        self._computing.join(_JOIN_S)

    def accept(self, link: Link) -> None:
        """Serve a link until it ends; returns at once. From any thread."""
        client = _Client(next(self._numbers), link)
        with self._lock:
            if self._is_stopping.is_set():
                link.close()
                return
            self._clients[client.number] = client
        self._metrics.connected(link)
        for name, work in (("read", self._read), ("send", self._send)):
            threading.Thread(
                target=work, args=(client,), name=f"control-{name}-{client.number}", daemon=True
            ).start()

    def metrics(self) -> Snapshot:
        """Return what it has measured so far."""
        return self._metrics.snapshot()

    def check_alive(self, max_silence_s: float) -> None:
        """Raise RuntimeError when the computing thread has died, or a batch takes longer."""
        if self._error is not None:
            raise RuntimeError(f"the computing thread has died: {self._error}")
        since_s = self._busy_since_s
        if since_s is not None and self._clock() - since_s > max_silence_s:
            raise RuntimeError(f"a batch is computed for {self._clock() - since_s:.1f} s")

    def _read(self, client: _Client) -> None:
        try:
            while True:
                message = client.link.receive()
                try:
                    self._inbox.put(self._task(client.number, message))
                finally:
                    message.release()
        except LinkClosed as closed:
            logger.info("link %d has ended: %s", client.number, closed)
        except (ValueError, TypeError) as error:
            logger.warning("link %d is closed: %s", client.number, error)
        except Exception:
            logger.exception("link %d is closed", client.number)
        finally:
            client.link.close()
            client.outbox.put(None)
            with self._lock:
                del self._clients[client.number]
            self._metrics.closed(client.link)
            self._inbox.put(lambda: self._batches.leave(client.number))

    def _task(self, client: int, message: Message) -> Callable[[], None]:
        """Return what a message asks for; ValueError or TypeError if it is none."""
        match TO_CONTROL.decode(message.head):
            case Open(key, specs):
                tensors = tensors_of(specs, message.frames)
                control_map = tensors.pop("map", None)
                if control_map is None:
                    raise ValueError(f"no map for {key}")
                conditioning = Conditioning.of(tensors)
                return lambda: self._batches.open(client, key, conditioning, control_map)
            case Steps(steps):
                rows = self._rows(client, steps, message.frames)
                return lambda: self._batches.step(rows)
            case Close(key):
                return lambda: self._batches.close(client, key)

    def _rows(
        self, client: int, steps: Sequence[Step], frames: Sequence[Bytes]
    ) -> list[WaitingRow]:
        if len(steps) != len(frames):
            raise ValueError(f"{len(frames)} latents for {len(steps)} steps")
        now_s, found = self._clock(), []
        for one, frame in zip(steps, frames, strict=True):
            (latents,) = tensors_of([one.latents], [frame]).values()
            due_s = now_s + one.slack_s
            found.append(WaitingRow(client, one.call, one.key, latents, one.timestep, due_s))
        return found

    def _compute_forever(self) -> None:
        while not self._is_stopping.is_set():
            first = _nothing if self._batches else self._inbox.get()
            self._busy_since_s = self._clock()
            first()
            with contextlib.suppress(Empty):
                while True:
                    self._inbox.get_nowait()()
            for answer in self._batches.compute():
                self._answer(answer)
            self._busy_since_s = None

    def _answer(self, answer: Answer) -> None:
        row = answer.row
        with self._lock:
            client = self._clients.get(row.client)
        if client is None:
            return
        if answer.residuals is not None:
            client.outbox.put(self._residue(row.call, answer.residuals))
        elif answer.refusal is not None:
            client.outbox.put(_Reply(Refused(row.call, answer.refusal)))
        else:
            client.outbox.put(_Reply(Unknown(row.call, row.key)))

    def _residue(self, call: int, residuals: RowResiduals) -> _Reply:
        tensors = (*residuals.down, residuals.mid)
        try:
            found = framed({str(index): one for index, one in enumerate(tensors)})
        except Exception as error:
            raise_if_broken(error)
            # it is of this row, and the thread has others
            logger.exception("residuals cannot be sent")
            return _Reply(Refused(call, f"residuals cannot be sent: {type(error).__name__}"))
        return _Reply(Residue(call, found.specs), found.frames)

    def _send(self, client: _Client) -> None:
        try:
            for reply in iter(client.outbox.get, None):
                try:
                    client.link.send(FROM_CONTROL.encode(reply.head), reply.frames)
                except ValueError as error:
                    # more than a link takes
                    refused = Refused(reply.head.call, f"residuals cannot be sent: {error}")
                    client.link.send(FROM_CONTROL.encode(refused))
        except LinkClosed:
            return
        except Exception:
            logger.exception("link %d is closed", client.number)
            # whoever is there asks another one, instead of waiting for what does not come
            client.link.close()

    def _break(self, _name: str, error: Exception) -> None:
        self._error = error
        self._is_stopping.set()
        self._close_links()

    def _close_links(self) -> None:
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.link.close()


def _nothing() -> None:
    """Wake the computing thread."""
