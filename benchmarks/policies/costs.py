"""What decisions cost, and an hour of simulation, from one GPU to a thousand."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from benchmarks.figures import percentile
from benchmarks.harness import Cost, Study
from benchmarks.policies.problems import LARGEST, ClusterSize, draw_problem
from ray_cluster.cell.front import core_of
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.allocation.allocation import allocate
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, GroupRequest, GroupView
from ray_cluster.policies.types import StepCost, WhenLate
from ray_cluster.protocol.leases import Finished, Lease, Poll, Registration
from ray_cluster.requests import ImageRequest, ImageResult, Timing
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.cell.cell import CellSpec, SimulatedCell, profile_of
from ray_cluster.simulator.cell.cell import PoolSpec as SimulatedPool
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.workload import FLUX_CLASSES, menus_of
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Kind, Mix, draw_workload

T = TypeVar("T")
# what a decision should take at most: of 1,024 replicas, 64 requests on a group, 1,024 GPUs
DISPATCH_MS, ROUND_MS, ALLOCATION_MS = 2.0, 1.0, 50.0
# seconds of an hour of 1,024 GPUs
HOUR_S = 60.0
GROUP_GPUS = 8
# one-GPU replicas, and requests that wait
CELLS = ((1, 10), (8, 100), (64, 1000), (256, 4000), (1024, 10_000))
# GPUs and requests of a group
CROWD_SIZES = ((1, 64), (4, 64), (8, 8), (8, 16), (8, 32), (8, 64))
CLUSTERS = (
    *(ClusterSize(1, 0, 1), ClusterSize(8, 1, 1), ClusterSize(64, 2, 2)),
    *(ClusterSize(256, 3, 3), LARGEST),
)
_MODEL = "model"
_IN_FLIGHT, _BATCH = 4, 2
_COST = StepCost(0.04, 0.017)
OURS = ("rounds/most", "rounds/large")
POLICIES = (*OURS, "widest", "knapsack/5/grid", "static/8-8-8-8/edf")
_NUM_STEPS, _SEED = 50, 5
# a request takes 3 s of a replica alone, so that they are busy for a quarter of the time
_RATE_PER_S = 84.0 / 1024
_SIDES_PX, _SLO_S, _POLL_S = (512, 768, 1024), 15.0, 30.0


def measure(study: Study) -> None:
    """Time decisions of dispatchers, groups and allocations, and simulated hours."""
    study.found["what"] = "one thread; hours are simulated, and so is who was in time in them"
    with _silence():
        for number, part in enumerate((_dispatch, _rounds, _allocation, _hours)):
            with study.part(number / 4, (number + 1) / 4):
                part(study)


class Samples:
    """CPU seconds of the thread by kind of decision."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, decision: str, call: Callable[[], T]) -> T:
        """Make a decision, and note what it took."""
        start = Cost.now()
        result = call()
        self.seconds[decision].append(Cost.now().since(start).cpu_s)
        return result

    def add(
        self,
        study: Study,
        decision: str,
        *,
        gpus: int,
        load: str,
        aim_ms: float | None = None,
        of_all: bool = False,
    ) -> None:
        """Add what a kind of decision took.

        Args:
            load: what it decides over, in words.
            aim_ms: what 99 of 100 should take at most, or all (``of_all``); None without an aim.
        """
        ms = [1e3 * one for one in self.seconds[decision]]
        p50, p99 = (percentile(ms, one) for one in (50, 99))
        figures = {"count": len(ms), "p50_ms": p50, "p99_ms": p99, "max_ms": max(ms)}
        study.row("decisions, CPU ms", decision=decision, gpus=gpus, load=load, **figures)
        if aim_ms is not None:
            name = f"{decision}, {gpus} GPUs, {load}: {'all' if of_all else '99 %'}"
            study.at_most(name, aim_ms, max(ms) if of_all else p99, "ms")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the dispatch core from logging every image."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _dispatch(study: Study) -> None:
    """Time offers, polls and reports of full cells with long queues: nothing makes an image."""
    for replicas, waiting in study.each(study.pick(CELLS, ((1, 4), (4, 20)))):
        crowd = _Cell(replicas, waiting)
        for _ in range(study.pick(400, 5)):
            crowd.turn()
        aim_ms = DISPATCH_MS if replicas == CELLS[-1][0] else None
        for decision in crowd.samples.seconds:
            load = f"{waiting} waiting"
            crowd.samples.add(study, decision, gpus=replicas, load=load, aim_ms=aim_ms)


class _Cell:
    """A cell in which every place is taken and many wait; one ends, one comes, turn by turn."""

    def __init__(self, replicas: int, waiting: int) -> None:
        limits = LimitsConfig(
            max_queue_s=1e9, max_queued_images=2 * waiting + _IN_FLIGHT * replicas
        )
        self._core = core_of(
            ClusterConfig(pools=(PoolConfig(name=_MODEL, model=_MODEL),), limits=limits)
        )
        self._rng = random.Random(replicas)
        self._num = 0
        self._held: dict[str, dict[str, Lease]] = {}
        self.samples = Samples()
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
        self.samples.seconds.clear()

    def turn(self) -> None:
        """Have one request end and be replaced, and another be refused if it would be late."""
        name = self._rng.choice(list(self._held))
        request_id, lease = self._held[name].popitem()
        result = ImageResult(request_id, b"", "png", Timing(), 0)
        event = Finished(request_id, lease.fence, result)
        self.samples.timed("report", lambda: self._core.report(name, [event], 1.0))
        self._poll(name)
        self._offer("accept")
        self._offer("refuse")

    def _poll(self, name: str) -> None:
        held = self._held[name]
        poll = Poll(name, 1, _IN_FLIGHT - len(held), dict.fromkeys(held, 1))
        reply = self.samples.timed("poll", lambda: self._core.poll(poll, 1.0))
        held |= {lease.request.request_id: lease for lease in reply.leases}

    def _offer(self, when_late: WhenLate) -> None:
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
        decision = "offer" if when_late == "accept" else "offer with a deadline"
        self.samples.timed(decision, lambda: self._core.offer([request], 1.0, client=None))


class Crowd(NamedTuple):
    """Groups of one sort.

    Attributes:
        sides_px: sizes of the images, in equal shares.
        scale: of their deadlines.
    """

    name: str
    sides_px: tuple[int, ...]
    scale: float


CROWDS = (
    Crowd("all sizes, most given up", (256, 512, 1024, 2048), 1.3),
    Crowd("smallest, a third given up", (256,), 1.5),
    Crowd("small, half given up", (256, 512), 1.5),
    Crowd("large, most given up", (1024, 2048), 1.5),
    Crowd("all sizes, few given up", (256, 512, 1024, 2048), 10.0),
    Crowd("all sizes, none given up", (256, 512, 1024, 2048), 30.0),
)


def _rounds(study: Study) -> None:
    """Time our policies on groups of every size, and others on the largest ones."""
    sizes = study.pick(CROWD_SIZES, ((2, 4), (8, 6)))
    cases = [
        (policy, crowd, *size)
        for size in sizes
        for policy in (POLICIES if size == max(sizes) else OURS)
        for crowd in CROWDS
    ]
    for policy, crowd, gpus, requests in study.each(cases):
        samples = Samples()
        menus = menus_of(load_profile("flux-h100-a"), num_gpus=gpus)
        planner, rng = planner_of(policy, menus), np.random.default_rng(_SEED)
        for _ in range(study.pick(300, 2)):
            group = draw_group(crowd, menus, requests, rng, num_gpus=gpus)
            samples.timed(policy, partial(planner, group))
        is_aimed_at = policy in OURS and (gpus, requests) == CROWD_SIZES[-1]
        load, aim_ms = f"{requests} requests: {crowd.name}", ROUND_MS if is_aimed_at else None
        samples.add(study, policy, gpus=gpus, load=load, aim_ms=aim_ms)


def draw_group(
    crowd: Crowd,
    menus: Mapping[str, DegreeMenu],
    count: int,
    rng: np.random.Generator,
    *,
    num_gpus: int,
) -> GroupView:
    """Return a group of so many requests at random points of their lives."""
    classes = [one for one in FLUX_CLASSES if one.side_px in crowd.sides_px]
    free, requests = num_gpus, []
    for number in range(count):
        one = classes[int(rng.integers(len(classes)))]
        degree = int(min(rng.choice([1, 2, 4, 8]), 2 ** (free.bit_length() - 1))) if free else 0
        free -= degree
        requests.append(
            _draw_request(number, menus[str(one.side_px)], crowd.scale * one.slo_s, degree, rng)
        )
    return GroupView(num_gpus, 0.0, tuple(requests), switch_s=0.01)


def _draw_request(
    number: int, menu: DegreeMenu, slo_s: float, degree: int, rng: np.random.Generator
) -> GroupRequest:
    arrival_s = -float(rng.uniform(0.0, slo_s / 2))
    steps_left = int(rng.integers(1, _NUM_STEPS + 1))
    return GroupRequest(
        number,
        menu,
        steps_left,
        arrival_s,
        arrival_s + slo_s,
        has_begun=degree > 0 or steps_left < _NUM_STEPS,
        degree=degree,
        target=degree,
        ready_s=float(rng.uniform(0.0, menu.fastest_s)),
    )


def _allocation(study: Study) -> None:
    """Time allocations of random clusters."""
    sizes = study.pick(CLUSTERS, (ClusterSize(1, 0, 1), ClusterSize(16, 1, 1)))
    # what is loaded and made with the first problem is no part of any
    allocate(draw_problem(0, size=sizes[0]))
    for size in study.each(sizes):
        samples, num_proven = Samples(), 0
        for seed in range(study.pick(100, 2)):
            problem = draw_problem(seed, size=size)
            num_proven += samples.timed("allocation", partial(allocate, problem)).is_proven
        about = f"{size.pools} pools, {num_proven} proven"
        aim_ms = ALLOCATION_MS if size == LARGEST else None
        samples.add(study, "allocation", gpus=size.gpus, load=about, aim_ms=aim_ms, of_all=True)


def _hours(study: Study) -> None:
    """Simulate an hour of cells: 1,024 GPUs get some 300,000 requests."""
    for replicas in study.each(study.pick((1, 8, 64, 256, 1024), (1, 4))):
        start = Cost.now()
        on_time = simulate_cell(replicas, study.pick(3600.0, 60.0))
        cpu_s = Cost.now().since(start).process_s
        columns = {"requests": len(on_time), "cpu_s": cpu_s, "on_time": float(np.mean(on_time))}
        study.row("simulated hours, seconds", gpus=replicas, **columns)
        if replicas == LARGEST.gpus:
            study.at_most("an hour of 1,024 replicas", HOUR_S, cpu_s, "s")


def simulate_cell(replicas: int, seconds: float) -> list[bool]:
    """Return who was in time in a cell with the production dispatcher and policies."""
    kinds = tuple(Kind(1.0, _MODEL, side, side, _NUM_STEPS) for side in _SIDES_PX)
    mix = Mix(kinds, lambda _: _SLO_S)
    workload = draw_workload(mix, constant_rate(_RATE_PER_S * replicas, seconds), seed=1)
    pool = SimulatedPool("pool", _MODEL, replicas, Hardware(_COST), 12, 16)
    result = SimulatedCell(CellSpec((pool,), poll_s=_POLL_S)).run(workload)
    return [fate.is_met for fate in result.fates]
