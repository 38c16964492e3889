"""A thread that writes copies of request states into the state store, and deletes them."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import MODEL_ERRORS
from ray_cluster.requests import state_name
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)

# what stores and damaged states raise
STORE_ERRORS: tuple[type[Exception], ...] = (BlobStoreError, *MODEL_ERRORS)

_WINDOW = 32
# costs that are older may not be true any more
_STALE_S = 30.0
_NUM_PROBES = 3
_LOG_EVERY_S = 60.0


class Blobs(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.BlobStore` that states need."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def delete(self, names: Iterable[str]) -> None: ...


@dataclass(slots=True, eq=False)
class _Copy:
    """A state on its way into the store."""

    state: RequestState
    is_wanted: Callable[[], bool]
    is_kept: bool = False
    settled: threading.Event = field(default_factory=threading.Event)


class StateWriter:
    """Writes the newest state of each request into a store, as fast as the store allows.

    It holds at most one waiting copy of each request and one that is being written. A store that
    fails or hangs costs nothing but the states. One thread writes and deletes, and checks right
    before a write whether the state is still wanted: no entry is written after its deletion.

    Args:
        model_digest: of the model that makes the states.
        cpu_clock: CPU seconds of the calling thread.
    """

    def __init__(
        self,
        store: Blobs,
        *,
        model_digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._store = store
        self._model_digest = model_digest
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._changed = threading.Condition()
        self._waiting: dict[str, _Copy] = {}
        self._probed: RequestState | None = None
        self._leaving: set[str] = set()
        self._entered: set[str] = set()
        self._busy_with: str | None = None
        self._is_closing = False
        self._num_kept = 0
        self._probe_s: float | None = None
        self._costs_s: deque[float] = deque(maxlen=_WINDOW)
        self._measured_s = clock()
        self._logged_s = -_LOG_EVERY_S
        self._thread = threading.Thread(target=self._run, name="states", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Delete what is to be deleted, and end the thread, or abandon it after a time-out."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def cost_s(self) -> float | None:
        """CPU seconds that writing one state takes, on average; None before that was measured."""
        with self._changed:
            if self._clock() - self._measured_s > _STALE_S:
                self._costs_s.clear()
            return statistics.fmean(self._costs_s) if self._costs_s else self._probe_s

    @property
    def num_kept(self) -> int:
        """States written so far."""
        with self._changed:
            return self._num_kept

    def is_busy(self, request_id: str) -> bool:
        """Whether a state of that request is still to be written."""
        with self._changed:
            return request_id in self._waiting or request_id == self._busy_with

    def probe(self, state: RequestState) -> None:
        """Measure what packing that state takes, without writing it."""
        with self._changed:
            self._probed = state
            self._changed.notify()

    def keep(self, state: RequestState, is_wanted: Callable[[], bool]) -> None:
        """Write a state, if it is still wanted when its turn comes, in place of earlier ones."""
        self._enter([_Copy(state, is_wanted)])

    def keep_all(
        self, states: Sequence[RequestState], is_wanted: Callable[[str], bool], timeout_s: float
    ) -> dict[str, int]:
        """Write states and wait, for so long; return the steps of those that are in the store.

        Args:
            is_wanted: asked for each request right before its state is written.
        """
        copies = [_Copy(one, partial(is_wanted, one.request.request_id)) for one in states]
        deadline_s = self._clock() + timeout_s
        self._enter(copies)
        for copy in copies:
            copy.settled.wait(max(0.0, deadline_s - self._clock()))
        states = [copy.state for copy in copies if copy.is_kept]
        return {state.request.request_id: state.step_index for state in states}

    def _enter(self, copies: Iterable[_Copy]) -> None:
        with self._changed:
            self._waiting |= {copy.state.request.request_id: copy for copy in copies}
            self._changed.notify()

    def expect(self, request_id: str) -> None:
        """Note that another replica may have stored a state of that request."""
        with self._changed:
            self._entered.add(request_id)

    def forget(self, request_id: str, *, is_ended: bool) -> None:
        """Stop writing states of a request; delete the stored one if the request has ended.

        What was given to :meth:`keep` must not be wanted any more.
        """
        with self._changed:
            if (dropped := self._waiting.pop(request_id, None)) is not None:
                dropped.settled.set()
            if request_id in self._entered:
                self._entered.discard(request_id)
                if is_ended:
                    self._leaving.add(request_id)
                    self._changed.notify()

    def _run(self) -> None:
        # no local of this loop may keep a state alive while the thread waits for the next
        while self._work(self._wait()):
            pass

    def _wait(self) -> bool:
        """Wait for work; False when there is nothing left to do before the end."""
        with self._changed:
            while not (self._leaving or self._is_closing or self._waiting or self._probed):
                self._changed.wait()
            return bool(self._leaving) or not self._is_closing

    def _work(self, is_open: bool) -> bool:
        """Delete first: what is to be written was wanted later."""
        with self._changed:
            leaving, self._leaving = self._leaving, set()
            probed, self._probed = self._probed, None
            copy: _Copy | None = None
            if not leaving and probed is None and self._waiting and is_open:
                copy = self._waiting.pop(next(iter(self._waiting)))
                self._busy_with = copy.state.request.request_id
        if leaving:
            with self._logged("delete"):
                self._store.delete([state_name(request_id) for request_id in leaving])
        if probed is not None:
            self._measure(probed)
        if copy is not None:
            self._write(copy)
        return is_open

    def _write(self, copy: _Copy) -> None:
        started_s, is_wanted = self._cpu_clock(), False
        with self._logged("take"):
            is_wanted = self._enter_wanted(copy)
            if is_wanted:
                data = copy.state.to_bytes(self._model_digest)
                self._store.put(state_name(copy.state.request.request_id), data)
                copy.is_kept = True
        with self._changed:
            self._busy_with = None
            self._num_kept += copy.is_kept
            if is_wanted:
                self._costs_s.append(self._cpu_clock() - started_s)
                self._measured_s = self._clock()
        copy.settled.set()

    def _enter_wanted(self, copy: _Copy) -> bool:
        """Return whether a state is still wanted, and note that it is entered if so."""
        with self._changed:
            # under one lock: a `forget` from now on finds that it has entered
            if is_wanted := copy.is_wanted():
                self._entered.add(copy.state.request.request_id)
            return is_wanted

    def _measure(self, state: RequestState) -> None:
        costs_s = []
        for _ in range(_NUM_PROBES):
            started_s = self._cpu_clock()
            with self._logged("take"):
                state.to_bytes()
            costs_s.append(self._cpu_clock() - started_s)
        with self._changed:
            self._probe_s = statistics.median(costs_s)

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Log now and then that the store fails; states are worth no more.

        Whatever the error: without this thread, every replica that leaves would wait in vain.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001
            if self._clock() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = self._clock()
                _log(what, error)


def _log(what: str, error: Exception) -> None:
    line = "the state store does not %s states: %s"
    if isinstance(error, STORE_ERRORS):
        logger.warning(line, what, error)
    else:
        # its text may have a prompt in it
        kind = RuntimeError(type(error).__name__)
        logger.error(line, what, kind, exc_info=kind.with_traceback(error.__traceback__))
