"""What a decision of the dispatcher costs, and an hour of a large cell.

Nothing computes an image here: replicas are the simulator's, or only take and report leases.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray_cluster.config import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.leases import Finished, Lease, Poll, Registration
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest, ImageResult, Timing
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.cell import Cell, CellSpec, PoolSpec, profile_of
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Kind, Mix, draw_workload

# replicas, and requests that wait
SCALES = ((1, 10), (8, 100), (64, 1000), (256, 4000), (1024, 10_000))
_MODEL = "model"
_IN_FLIGHT, _BATCH = 4, 2
_COST = StepCost(0.04, 0.017)
_TURNS = 400
# of the hour: a request takes 3 s of a replica alone, so that a thousand are busy for a quarter
_HOUR_REPLICAS, _HOUR_RATE, _HOUR_S, _HOUR_POLL_S = 1024, 84.0, 3600.0, 30.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU milliseconds of one kind of decision."""

    replicas: int
    waiting: int
    decision: str
    mean_ms: float
    p99_ms: float


def measure_decisions(replicas: int, waiting: int) -> Iterator[Cost]:
    """Time offers, polls and reports of a full cell with a long queue."""
    crowd = _Crowd(replicas, waiting)
    for _ in range(_TURNS):
        crowd.turn()
    for decision, seconds in crowd.seconds.items():
        ordered = sorted(seconds)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        mean = sum(ordered) / len(ordered)
        yield Cost(replicas, waiting, decision, 1e3 * mean, 1e3 * p99)


class _Crowd:
    """A cell in which every place is taken and many wait; one ends, one comes, turn by turn."""

    def __init__(self, replicas: int, waiting: int) -> None:
        limits = LimitsConfig(max_queued_images=2 * waiting + _IN_FLIGHT * replicas)
        self._core = DispatchCore(config=DispatchConfig(), limits=limits, epoch=1)
        self._rng = random.Random(replicas)
        self._num = 0
        self._held: dict[str, dict[str, Lease]] = {}
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(replicas):
            name = f"r{number}"
            self._held[name] = {}
            self._core.register(
                Registration(name, profile_of(_MODEL), _IN_FLIGHT, _BATCH, _COST), 0.0
            )
        for _ in range(waiting + _IN_FLIGHT * replicas):
            self._offer("accept")
        for name in self._held:
            self._poll(name)
        self.seconds.clear()

    def turn(self) -> None:
        name = self._rng.choice(list(self._held))
        request_id, lease = self._held[name].popitem()
        result = ImageResult(request_id, b"", "png", Timing(), 0)
        event = Finished(request_id, lease.fence, result)
        self._timed("report", lambda: self._core.report(name, [event], 1.0))
        self._poll(name)
        self._offer("accept")
        self._offer("refuse")

    def _poll(self, name: str) -> None:
        held = self._held[name]
        done = dict.fromkeys(held, 1)
        poll = Poll(name, 1, _IN_FLIGHT - len(held), done)
        reply = self._timed("poll", lambda: self._core.poll(poll, 1.0))
        held |= {lease.request.request_id: lease for lease in reply.leases}

    def _offer(self, when_late: Any) -> None:
        self._num += 1
        request = ImageRequest(
            request_id=f"{self._num}",
            model=_MODEL,
            prompt="",
            width_px=1024,
            height_px=1024,
            num_steps=self._rng.randint(20, 50),
            guidance_scale=2.0,
            sampler="ddim",
            seed=0,
            slo_s=self._rng.uniform(1e4, 2e4),
            when_late=when_late,
        )
        kind = "offer" if when_late == "accept" else "offer that minds being late"
        self._timed(kind, lambda: self._core.offer([request], 1.0, client=None))

    def _timed(self, decision: str, call: Callable[[], Any]) -> Any:
        start_s = time.thread_time()
        result = call()
        self.seconds[decision].append(time.thread_time() - start_s)
        return result


@dataclass(frozen=True, slots=True)
class Hour:
    """One simulated hour."""

    replicas: int
    requests: int
    cpu_s: float
    wall_s: float
    attainment: float


def simulate_hour(seconds: float = _HOUR_S) -> Hour:
    """Simulate an hour of a thousand replicas with the production dispatcher and policies."""
    kinds = [Kind(1.0, _MODEL, side, side, 50) for side in (512, 768, 1024)]
    mix = Mix(tuple(kinds), lambda _: 15.0)
    workload = draw_workload(mix, constant_rate(_HOUR_RATE, seconds), seed=1)
    pool = PoolSpec("pool", _MODEL, _HOUR_REPLICAS, Hardware(_COST), 12, 16)
    cell = Cell(CellSpec((pool,), poll_s=_HOUR_POLL_S))
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = cell.run(workload)
    return Hour(
        _HOUR_REPLICAS,
        len(workload),
        time.process_time() - cpu_s,
        time.perf_counter() - wall_s,
        result.attainment,
    )


def quiet() -> None:
    """Keep the dispatch core from logging every image."""
    logging.disable(logging.WARNING)


def all_decisions(scales: Sequence[tuple[int, int]] = SCALES) -> list[Cost]:
    """Time decisions at every scale."""
    return [cost for replicas, waiting in scales for cost in measure_decisions(replicas, waiting)]
