"""Replicas of a service under load are driven up and down, to zero and back.

The controller does it: bounds change in the live settings, a count is changed by hand, a model is
called that has no replica, or is not called any more. Then demand oscillates around what one
replica makes.
"""

from __future__ import annotations

import base64
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from benchmarks.serving.calls import image_body
from benchmarks.serving.controller_amounts import Amounts
from benchmarks.serving.controller_audit import Ended, audit
from benchmarks.serving.controller_calls import pixels_of
from benchmarks.serving.controller_service import (
    HEAVY,
    LIGHT,
    ControlledContender,
    Service,
    controlled,
    until,
)

Kind = Literal["called", "up", "down", "by hand", "silent"]
# a light model without calls goes to zero and comes back, and one under load up, down, and back
KINDS: tuple[Kind, ...] = ("called", "up", "down", "by hand", "silent")
# that end with another replica
STARTS: tuple[Kind, ...] = ("called", "up")
# replicas that they end with
_WANTED: Mapping[Kind, int] = {"called": 1, "up": 2, "down": 1, "by hand": 1, "silent": 0}
_PERIOD_S = 1.0
# while replicas are driven: what has just changed may change again
_DRIVEN_DWELL_S = 1.0
_PATIENCE_S = 90.0
# after which a replica whose count was set to zero by hand, and back, was not stopped
_SPARED_S = 3.0
_NUM_SEEDS = 12
_STEADY_CLIENTS, _PAUSE_S, _STEADY_STEPS = 3, 1.5, 10
_LIGHT_STEPS = 2
_CROWD, _CROWD_STEPS = 10, 20
# of a dwell time, for which the crowd calls and is silent in turn
_HALF_WAVE = 1 / 3


@dataclass(frozen=True, slots=True)
class Reshape:
    """One change of a pool's replicas.

    Attributes:
        forced_s: Unix time at which it was called for.
        planned_s: at which the controller's round began that planned it; None if none did.
        done_s: at which the dispatcher knew the replicas that were planned; None if it never did.
    """

    kind: Kind
    forced_s: float
    planned_s: float | None = None
    done_s: float | None = None

    @property
    def took_s(self) -> float | None:
        """Seconds from the plan until it was real; None if it never was."""
        if self.planned_s is None or self.done_s is None:
            return None
        return max(0.0, self.done_s - self.planned_s)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """What the whole part found.

    Attributes:
        changes: of the pool's replicas, in each dwell time of oscillating demand.
        problems: of calls, and of reshapes that never came.
    """

    reshapes: Sequence[Reshape]
    changes: Sequence[int]
    num_calls: int
    problems: Sequence[str]


class Callers:
    """Clients that call for one image after the other, and what they got."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.num_sent = 0
        self.ended: list[Ended] = []

    def call(self, client: httpx.Client, model: str, num_steps: int) -> None:
        """Have one image made, and note what became of the call."""
        with self._lock:
            number = next(self._numbers)
            self.num_sent += 1
        seed = number % _NUM_SEEDS
        body = {**image_body(seed, num_steps=num_steps, guidance_scale=2.0), "model": model}
        pixels, error = None, ""
        try:
            reply = client.post("/v1/images/generations", json=body).raise_for_status()
            [image] = reply.json()["data"]
            pixels = pixels_of(base64.b64decode(image["b64_json"]))
        except (httpx.HTTPError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:200]
        # images of other step counts are others
        self.ended.append(Ended(number, (f"{model}, {num_steps} steps", seed), pixels, error))

    @contextmanager
    def crowd(
        self, num_clients: int, num_steps: int, *, pause_s: float, is_on: Callable[[], bool]
    ) -> Iterator[None]:
        """Clients that call the heavy model within the block, while it is their time."""
        over = threading.Event()

        def work() -> None:
            with self._service.client() as client:
                while not over.is_set():
                    if is_on():
                        self.call(client, HEAVY, num_steps)
                    over.wait(pause_s)

        with ThreadPoolExecutor(num_clients) as pool:
            clients: list[Future[None]] = [pool.submit(work) for _ in range(num_clients)]
            try:
                yield
            finally:
                over.set()
            for one in clients:
                one.result()


def _contender() -> ControlledContender:
    return ControlledContender(
        what="two models, planned",
        cascade=None,
        control={"period_s": _PERIOD_S, "dwell_s": _DRIVEN_DWELL_S},
        pools={
            HEAVY: {"min_replicas": 1, "max_replicas": 1},
            LIGHT: {"min_replicas": 0, "max_replicas": 1},
        },
    )


def reshape(amounts: Amounts, say: Callable[[float, str], None]) -> Reshaped:
    """Run the service, reshape it, and have demand oscillate."""
    contender = _contender()
    with controlled(contender) as service:
        callers = Callers(service)
        before = contender.counts(service.url)
        done = list(
            Shaper(service, callers).run(amounts.reshapes, lambda part: say(0.8 * part, ""))
        )
        say(0.8, "oscillating demand")
        changes = _oscillate(service, callers, amounts)
        # replicas report what they have ended with their next call
        until(lambda: contender.counts(service.url).since(before).open == 0, most_s=20.0)
        counts = contender.counts(service.url).since(before)
    problems = [
        *audit(callers.num_sent, callers.ended, counts),
        *(f"never done: {one}" for one in done if one.took_s is None),
    ]
    return Reshaped(done, changes, callers.num_sent, problems)


class Shaper:
    """Forces reshapes of a service, one after the other."""

    def __init__(self, service: Service, callers: Callers) -> None:
        self._service = service
        self._callers = callers
        # since when nobody calls the light model, and when its last replica was gone
        self._silent_s = time.time()
        self._gone_s: float | None = None

    def run(self, count: int, say: Callable[[float], None]) -> Iterator[Reshape]:
        """Yield so many reshapes, under the load of a few clients."""
        steady = self._callers.crowd(
            _STEADY_CLIENTS, _STEADY_STEPS, pause_s=_PAUSE_S, is_on=lambda: True
        )
        with steady:
            until(lambda: all(self._look().values()), most_s=_PATIENCE_S)
            until(lambda: not self._look()[LIGHT], most_s=_PATIENCE_S)
            for number in range(count):
                say(number / count)
                yield self._one(KINDS[number % len(KINDS)])

    def _one(self, kind: Kind) -> Reshape:
        """Force one reshape, and wait until it is done."""
        pool = LIGHT if kind in ("called", "silent") else HEAVY
        wanted = _WANTED[kind]
        before = self._look()[pool]
        forced_s = self._silent_s if kind == "silent" else time.time()
        with ThreadPoolExecutor(1) as thread:
            if kind == "called":
                thread.submit(self._call_light)
            elif kind == "by hand":
                self._service.scale(pool, 0)
            elif kind in ("up", "down"):
                bounds = {"min_replicas": wanted, "max_replicas": wanted}
                self._service.tune({pool: bounds})

            def is_done() -> bool:
                live = self._look()[pool]
                if len(live) != wanted:
                    return False
                if live - before or kind not in (*STARTS, "by hand"):
                    return True
                # healed before Serve has stopped a replica
                planned_s = self._planned_at(pool, wanted, forced_s)
                return kind == "by hand" and time.time() > (planned_s or math.inf) + _SPARED_S

            is_met = until(is_done, most_s=_PATIENCE_S)
            done_s = time.time() if is_met else None
        planned_s = self._planned_at(pool, wanted, forced_s)
        if kind == "silent" and is_met:
            done_s = self._gone_s
        if kind == "by hand" and is_met and self._look()[pool] == before:
            done_s = planned_s
        return Reshape(kind, forced_s, planned_s, done_s)

    def _planned_at(self, pool: str, wanted: int, since_s: float) -> float | None:
        return planned_at(self._service.plan()["history"], pool, wanted, since_s)

    def _look(self) -> dict[str, set[str]]:
        live = self._service.live()
        if not live[LIGHT] and self._gone_s is None:
            self._gone_s = time.time()
        elif live[LIGHT]:
            self._gone_s = None
        return live

    def _call_light(self) -> None:
        with self._service.client() as client:
            self._callers.call(client, LIGHT, _LIGHT_STEPS)
        self._silent_s = time.time()


def planned_at(
    history: Sequence[Mapping[str, Any]], pool: str, wanted: int, since_s: float
) -> float | None:
    """Return when the first round since an instant began that planned so many replicas.

    Args:
        history: rounds that changed something, of ``/v1/plan``.
    """
    found = [
        one["at"] - one["took_s"]
        for one in history
        if one["at"] >= since_s and any(_is_to(action, pool, wanted) for action in one["actions"])
    ]
    return min(found, default=None)


def _is_to(action: str, pool: str, wanted: int | None = None) -> bool:
    """Whether an action changes a pool's replicas, to a number."""
    return action.startswith(f"{pool}: ") and (
        wanted is None or action.endswith(f" to {wanted} replicas")
    )


def _oscillate(service: Service, callers: Callers, amounts: Amounts) -> list[int]:
    """Return how often the pool's replicas changed in each dwell time."""
    service.tune({HEAVY: {"min_replicas": 1, "max_replicas": 2}}, dwell_s=amounts.dwell_s)
    # until the settings are read, and the plan for few clients is there
    time.sleep(2 * _PERIOD_S + 1.0)
    begin_s, half_s = time.time(), _HALF_WAVE * amounts.dwell_s

    def is_on() -> bool:
        return int((time.time() - begin_s) // half_s) % 2 == 0

    with callers.crowd(_CROWD, _CROWD_STEPS, pause_s=0.05, is_on=is_on):
        time.sleep(amounts.dwells * amounts.dwell_s)
    history = service.plan()["history"]
    return changes_by_dwell(history, HEAVY, begin_s, amounts.dwell_s, amounts.dwells)


def changes_by_dwell(
    history: Sequence[Mapping[str, Any]], pool: str, begin_s: float, dwell_s: float, count: int
) -> list[int]:
    """Return how often a pool's replicas changed in each of so many dwell times."""
    found = [0] * count
    for one in history:
        place = math.floor((one["at"] - begin_s) / dwell_s)
        if 0 <= place < count:
            found[place] += sum(_is_to(action, pool) for action in one["actions"])
    return found
