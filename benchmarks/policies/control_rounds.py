"""What a whole round of the controller costs beside its dispatcher, Ray and Serve not counted.

A dispatcher with its job store and a plan loop stand in one process, as they are in a cell: the
round observes, plans, applies caps and thresholds, and saves its record and memory. Requests,
queues and confidences are drawn, for no image is made.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dispatcher.fakes import profile_of
from benchmarks.dispatcher.section import services
from benchmarks.harness import Study
from benchmarks.policies.samples import Samples
from ray_cluster.codec.values import TextCodec
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import registered, worker_arguments
from ray_cluster.control.cell_fleet import Curves
from ray_cluster.control.live import LiveCluster, LivePlanner
from ray_cluster.control.loop import ControlLoop
from ray_cluster.control.records import Times, record_of
from ray_cluster.jobs.controller import ControlService
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.policies.planning.cell_planner import CellMemory
from ray_cluster.policies.planning.plan import PlannedSettings
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.controller import ModelQueue, Observation, RoundRecord, ServiceCount
from ray_cluster.protocol.leases import Registration

AIM_MS = 100.0
# pools at which it holds, and cascades of two of them each
NUM_POOLS, NUM_CASCADES = 20, 4
_NUM_REPLICAS = 2
_SUPPLY = {"cpu": 6400}
_PERIOD_S = 5.0
# requests per second of the busiest service
_MOST_PER_S = 4.0
_JUDGE = "judge"
_MEMORY: TextCodec[CellMemory] = TextCodec(CellMemory)
_CURVES = load_curves("diffserve-1")


def measure_controller(study: Study) -> None:
    """Time rounds of a cell of 20 pools, four cascades among them."""
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="controller-") as folder:
        asyncio.run(_rounds(Path(folder), study.pick(300, 3), samples, study))
    load = f"{NUM_POOLS} pools, {NUM_CASCADES} cascades"
    samples.add(study, "control round", gpus=_SUPPLY["cpu"] // 100, load=load, aim_ms=AIM_MS)


class DrawnCell:
    """A dispatcher whose cell has the demand of a random day, and a scaler that always succeeds."""

    def __init__(self, control: ControlService, rng: np.random.Generator) -> None:
        self._control = control
        self._rng = rng
        self._began_s = time.time()
        self._arrived: Counter[str] = Counter()
        self._num_rounds = 0
        self.num_replicas = {
            **{_pool(index): _NUM_REPLICAS for index in range(NUM_POOLS)},
            _JUDGE: 1,
        }

    def targets(self) -> Mapping[str, int]:
        return dict(self.num_replicas)

    def scale(self, pool: str, num_replicas: int) -> None:
        self.num_replicas[pool] = num_replicas

    def supply(self) -> Mapping[str, int]:
        return _SUPPLY

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Return what the dispatcher shows, with drawn demand."""
        seen = await self._control.observe(cursors)
        self._num_rounds += 1
        for number, service in enumerate(one.name for one in seen.services):
            per_s = _MOST_PER_S * (1 + np.sin(number + self._num_rounds / 10)) / 2
            self._arrived[service] += int(self._rng.poisson(per_s * _PERIOD_S))
        scored = [self._rng.uniform(0, 1, int(self._rng.integers(200))) for _ in seen.cascades]
        return replace(
            seen,
            now_s=self._began_s + _PERIOD_S * self._num_rounds,
            services=tuple(
                ServiceCount(one.name, self._arrived[one.name]) for one in seen.services
            ),
            models=tuple(
                ModelQueue(one.serves, int(self._rng.integers(20)), 4) for one in seen.pools
            ),
            cascades=tuple(
                replace(one, confidences=tuple(found.tolist()))
                for one, found in zip(seen.cascades, scored, strict=True)
            ),
        )

    async def apply_plan(self, plan: PlannedSettings) -> None:
        await self._control.apply_plan(plan)

    async def note_round(self, record: RoundRecord, memory: str | None) -> None:
        await self._control.note_round(record, memory)

    async def wake(self, seen: int, wait_s: float) -> int:
        return await self._control.wake(seen, wait_s)

    async def memory(self) -> str:
        return await self._control.memory()


async def _rounds(folder: Path, count: int, samples: Samples, study: Study) -> None:
    async with _cell(folder) as control:
        # as a controller does when it starts
        gc.freeze()
        cell = DrawnCell(control, np.random.default_rng(0))
        curves = Curves(_CURVES.quality, _CURVES.deferral)
        cluster = LiveCluster(cell, asyncio.get_running_loop(), cell, lambda _source: curves)
        loop = ControlLoop(
            LivePlanner(lambda: cluster.glance), cluster, time.monotonic, limits=cluster.limits
        )
        # the first one loads what all need
        for number in range(count + 1):
            study.say(number / (count + 1), f"round {number} of {count}")
            began_s, cpu_s = time.time(), time.process_time()
            found = await asyncio.to_thread(loop.run_round)
            assert loop.memory is not None, "a round without an observation"
            times = Times(began_s, time.time() - began_s, 10.0)
            record = record_of(found, cluster.glance, loop.memory, times)
            await cell.note_round(record, _MEMORY.encode(loop.memory))
            if number:
                samples.seconds["control round"].append(time.process_time() - cpu_s)


@asynccontextmanager
async def _cell(folder: Path) -> AsyncIterator[ControlService]:
    config = _config()
    async with services(folder) as (_core, dispatch, jobs):
        dispatch.apply(jobs.control.planned(settings_of(config)))
        for pool in config.pools:
            arguments = registered(worker_arguments(config, pool.name).own)
            for number in range(_NUM_REPLICAS):
                worker = _worker(pool.name, number, arguments)
                await dispatch.register(worker)
                jobs.control.note_worker(worker)
        judge = registered(worker_arguments(config, _JUDGE).own)
        worker = replace(_worker(_JUDGE, 0, judge), kind="score", profile=None)
        await dispatch.register(worker)
        jobs.control.note_worker(worker)
        yield jobs.control


def _config() -> ClusterConfig:
    cascades = [
        {
            "name": f"auto-{index}",
            "light": _pool(2 * index),
            "heavy": _pool(2 * index + 1),
            "discriminator": _JUDGE,
            "threshold": 0.5,
        }
        for index in range(NUM_CASCADES)
    ]
    pools: list[dict[str, Any]] = [
        {"name": _pool(index), "model": "shapes-sd", "max_replicas": 16}
        for index in range(NUM_POOLS)
    ]
    judges = [{"name": _JUDGE, "model": "shapes-discriminator"}]
    return ClusterConfig.model_validate(
        {"pools": pools, "discriminators": judges, "cascades": cascades}
    )


def _pool(index: int) -> str:
    return f"pool-{index}"


def _worker(pool: str, number: int, arguments: str) -> Registration:
    # of a cascade, the first is the light one
    is_light = pool != _JUDGE and int(pool.partition("-")[2]) % 2 == 0
    cost = StepCost(0.01, 2.0 if is_light else 8.0, decode_per_megapixel_s=0.5)
    found = Registration(f"{pool}-{number}", profile_of(pool), 8, 4, cost)
    return replace(found, pool=pool, load_s=9.0, arguments=arguments)
