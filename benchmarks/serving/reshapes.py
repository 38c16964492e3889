"""The controller: replicas driven up and down under load, and demand that comes and goes.

Every call must end once, with the image of its seed.
"""

from __future__ import annotations

import base64
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any, Literal, NamedTuple

import httpx
import yaml

from benchmarks.figures import mean_figure, summarise
from benchmarks.harness import Study
from benchmarks.serving.cascade import HEAVY, LIGHT, Pixels, differ, pixels_of
from benchmarks.serving.controller import Controlled, live_replicas, plan_of
from benchmarks.serving.services import (
    Contender,
    Counts,
    Running,
    calling,
    image_body,
    post_image,
    running,
    until,
)

Kind = Literal["called", "up", "down", "by hand", "silent"]
# a light model without calls goes to zero and comes back, and one under load up, down, and back
KINDS: tuple[Kind, ...] = ("called", "up", "down", "by hand", "silent")
# that end with another replica
STARTS: tuple[Kind, ...] = ("called", "up")
# replicas that they end with
_WANTED: Mapping[Kind, int] = {"called": 1, "up": 2, "down": 1, "by hand": 1, "silent": 0}
MOST_RESHAPE_S, MOST_CHANGES = 12.0, 1.0
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
_CONTROLLED = Controlled(
    control={"period_s": _PERIOD_S, "dwell_s": _DRIVEN_DWELL_S},
    cascade=None,
    pools={
        HEAVY: {"min_replicas": 1, "max_replicas": 1},
        LIGHT: {"min_replicas": 0, "max_replicas": 1},
    },
)


class Reshape(NamedTuple):
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


class Ended(NamedTuple):
    """A call that has ended.

    Attributes:
        number: of the call, unique in a run.
        subject: model and seed; calls with the same one must get the same image.
        pixels: [H, W, 3]; None if there was no image.
        error: what the client got instead.
    """

    number: int
    subject: tuple[str, int]
    pixels: Pixels | None
    error: str = ""


def measure(study: Study) -> None:
    """Run the service, reshape it, and have demand oscillate."""
    count, dwells, dwell_s = study.pick(50, 5), study.pick(8, 2), study.pick(15.0, 10.0)
    contender = Contender(what="two models, planned", change=_CONTROLLED.of)
    with running(contender) as service:
        callers = Callers(service)
        before = contender.counts(service.url)
        with study.part(0.0, 0.8), closing(Shaper(service, callers)) as shaper:
            done = [shaper.force(kind) for kind in study.each([*KINDS * count][:count])]
        study.say(0.8, "oscillating demand")
        changes = _oscillate(service, callers, dwell_s, dwells)
        # replicas report what they have ended with their next call
        until(lambda: contender.counts(service.url).since(before).open == 0, most_s=20.0)
        counts = contender.counts(service.url).since(before)
    study.found["what"] = f"{len(done)} reshapes under load, {callers.num_sent} calls"
    tabulate(study, done, changes)
    for problem in audit(callers.num_sent, callers.ended, counts):
        study.fail(problem)


def tabulate(study: Study, done: Sequence[Reshape], changes: Sequence[int]) -> None:
    """Add the tables and aims.

    Args:
        changes: of the pool's replicas, in each dwell time of oscillating demand.
    """
    for kind in dict.fromkeys(one.kind for one in done):
        own = [one for one in done if one.kind == kind]
        took_s = [one.took_s for one in own if one.took_s is not None]
        planned_s = [one.planned_s - one.forced_s for one in own if one.planned_s is not None]
        columns = {
            "count": len(own),
            "done": len(took_s),
            "until planned, s": summarise(planned_s) if planned_s else None,
            "from plan to done, s": summarise(took_s) if took_s else None,
        }
        study.row("reshapes", reshape=kind, **columns)
    for place, number in enumerate(changes, 1):
        title = "changes of replicas under oscillating demand"
        study.row(title, **{"dwell time": place, "changes": number})
    starts_s = [one.took_s for one in done if one.kind in STARTS and one.took_s is not None]
    if starts_s:
        study.at_most("from plan to replica, p50", MOST_RESHAPE_S, summarise(starts_s), "s")
    study.at_most("changes in a dwell time", MOST_CHANGES, mean_figure(changes), "changes")
    for one in done:
        if one.took_s is None:
            study.fail(f"never done: {one}")


def audit(num_sent: int, ended: Sequence[Ended], counts: Counts) -> Iterator[str]:
    """Yield what went wrong, in words.

    Args:
        num_sent: calls that clients sent.
        ended: those that ended.
        counts: what the service counted of them.
    """
    times = Counter(one.number for one in ended)
    if len(times) < num_sent:
        yield f"{num_sent - len(times)} of {num_sent} calls never ended"
    if counts.open > 0:
        yield f"{counts.open} images were accepted and never ended: {counts}"
    for error, number in Counter(one.error for one in ended if one.pixels is None).items():
        yield f"{number} calls failed: {error}"
    for number, count in times.items():
        if count > 1:
            yield f"the call {number} ended {count} times"
    num_images = sum(one.pixels is not None for one in ended)
    if counts.completed > num_images:
        yield f"the service completed {counts.completed} images, and clients got {num_images}"
    first: dict[tuple[str, int], Pixels] = {}
    for one in ended:
        if one.pixels is not None and differ(first.setdefault(one.subject, one.pixels), one.pixels):
            yield f"the image of call {one.number} is not the first one of {one.subject}"


class Callers:
    """Clients that call for one image after the other, and what they got."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._numbers = itertools.count()
        self.num_sent = 0
        self.ended: list[Ended] = []
        self._lock = threading.Lock()

    def call(self, client: httpx.Client, model: str, num_steps: int) -> None:
        """Have one image made, and note what became of the call."""
        with self._lock:
            number = next(self._numbers)
            self.num_sent += 1
        seed, pixels, error = number % _NUM_SEEDS, None, ""
        body = image_body(seed, num_steps, guidance_scale=2.0, model=model)
        try:
            pixels = pixels_of(base64.b64decode(post_image(client, body).image["b64_json"]))
        except (httpx.HTTPError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:200]
        # images of other step counts are others
        self.ended.append(Ended(number, (f"{model}, {num_steps} steps", seed), pixels, error))

    def crowd(
        self, num: int, num_steps: int, *, pause_s: float, is_on: Callable[[], bool]
    ) -> AbstractContextManager[object]:
        """Clients that call the heavy model within the block, while it is their time."""

        def act(client: httpx.Client, _number: int, _call: int) -> None:
            if is_on():
                self.call(client, HEAVY, num_steps)
            time.sleep(pause_s)

        return calling(self._service, num, act)


class Shaper:
    """Forces reshapes of a service, one after the other, under the load of a few clients."""

    def __init__(self, service: Running, callers: Callers) -> None:
        self._service, self._callers = service, callers
        # since when nobody calls the light model, and when its last replica was gone
        self._silent_s = time.time()
        self._gone_s: float | None = None
        self._steady = ExitStack()
        crowd = callers.crowd(_STEADY_CLIENTS, _STEADY_STEPS, pause_s=_PAUSE_S, is_on=lambda: True)
        self._steady.enter_context(crowd)
        until(lambda: all(self._look().values()), most_s=_PATIENCE_S)
        until(lambda: not self._look()[LIGHT], most_s=_PATIENCE_S)

    def close(self) -> None:
        """End the load."""
        self._steady.close()

    def force(self, kind: Kind) -> Reshape:
        """Force one reshape, and wait until it is done."""
        pool = LIGHT if kind in ("called", "silent") else HEAVY
        wanted = _WANTED[kind]
        before = self._look()[pool]
        forced_s = self._silent_s if kind == "silent" else time.time()
        with ThreadPoolExecutor(1) as thread:
            if kind == "called":
                thread.submit(self._call_light)
            elif kind == "by hand":
                scale(self._service, pool, 0)
            elif kind in ("up", "down"):
                bounds = {"min_replicas": wanted, "max_replicas": wanted}
                tune(self._service, {pool: bounds})

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
        return planned_at(plan_of(self._service)["history"], pool, wanted, since_s)

    def _look(self) -> dict[str, set[str]]:
        live = live_replicas(self._service)
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


def _oscillate(service: Running, callers: Callers, dwell_s: float, dwells: int) -> list[int]:
    """Return how often the pool's replicas changed in each dwell time."""
    tune(service, {HEAVY: {"min_replicas": 1, "max_replicas": 2}}, dwell_s=dwell_s)
    # until the settings are read, and the plan for few clients is there
    time.sleep(2 * _PERIOD_S + 1.0)
    begin_s, half_s = time.time(), _HALF_WAVE * dwell_s

    def is_on() -> bool:
        return int((time.time() - begin_s) // half_s) % 2 == 0

    with callers.crowd(_CROWD, _CROWD_STEPS, pause_s=0.05, is_on=is_on):
        time.sleep(dwells * dwell_s)
    return changes_by_dwell(plan_of(service)["history"], HEAVY, begin_s, dwell_s, dwells)


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


def scale(service: Running, pool: str, num_replicas: int) -> None:
    """Change a pool's replicas by hand, through Ray Serve's scale endpoint."""
    file = service.folder / "service.yaml"
    port = yaml.safe_load(file.read_text(encoding="utf-8"))["ray"]["dashboard_port"]
    path = f"/api/v1/applications/{pool}/deployments/BaseModel/scale"
    body = {"target_num_replicas": num_replicas}
    url = f"http://127.0.0.1:{port}{path}"
    httpx.post(url, json=body, timeout=30).raise_for_status()


def tune(service: Running, changes: Mapping[str, Mapping[str, Any]], **control: Any) -> None:
    """Change live settings: those of pools by name, and those of the controller."""
    file = service.folder / "service.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for pool in content["pools"]:
        pool.update(changes.get(pool["name"], {}))
        # of a start, which must lie within the bounds
        most = pool.get("max_replicas") or math.inf
        pool["replicas"] = max(pool.get("min_replicas", 1), min(pool.get("replicas", 1), most))
    content["control"].update(control)
    other = file.with_suffix(".new")
    other.write_text(yaml.safe_dump(content), encoding="utf-8")
    # its reader sees all of the old or all of the new
    other.replace(file)
