"""The study with the real model: dispatcher, worker and engine of the service, in one process.

Nothing but Ray and HTTP is left out. Arrivals are an open loop: they do not wait for answers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import MODEL, Study
from benchmarks.prediction.study import (
    FALSE_AIM,
    LOADS,
    MEDIAN_AIM,
    P95_AIM,
    Ended,
    Mix,
    Planned,
    draw_trace,
    figures,
)
from ray_cluster.cell.local import LocalCell
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig, StorageConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.engine.device.timing import OperationTimer
from ray_cluster.engine.models.loading import load_model
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.policies.types import WhenLate
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import ImageRequest

_GUIDANCE = 2.0
_REPEATS = 3
_WAIT_S = 5.0
_START_S = 60.0
_FOREVER_S = 1e5
_WHEN_LATE: tuple[WhenLate, ...] = ("refuse", "accept")
_SIDES, _MAX_BATCH, _SEED = (64, 96, 128), 8, 0
_MIXES = (Mix("equal", _SIDES, (20, 20)), Mix("mixed", _SIDES, (10, 30)))
_QUICK = (Mix("equal", (64,), (3, 3)), Mix("mixed", (64, 96), (2, 4)))


def measure(study: Study) -> None:
    """Run traces of several loads."""
    study.found["what"] = (
        "predicted ends beside real ones, in percent; wanted: error_median "
        f"{MEDIAN_AIM:g}, error_p95 {P95_AIM:g}, false_refusals {FALSE_AIM:g} at most"
    )
    pool = pool_of(_SIDES, _MAX_BATCH)
    speed = measure_speed(pool, _SIDES)
    for mix, load in study.each(product(study.pick(_MIXES, _QUICK), LOADS)):
        found = run_live(pool, speed, mix, load, study.pick(80, 8), _SEED)
        study.row("live traces", steps=mix.name, load=load, **found)


@dataclass(frozen=True, slots=True)
class Speed:
    """What the model takes on this machine, measured at the beginning.

    Attributes:
        step_s: seconds of a step alone, by side.
        aside_s: seconds of encoding and decoding one image, by side.
        image_s: seconds per image and step in batches of all sizes, as large as they may be.
    """

    step_s: Mapping[int, float]
    aside_s: Mapping[int, float]
    image_s: float

    def alone_s(self, planned: Planned) -> float:
        """Return the seconds of a request on an idle replica."""
        side = planned.side_px
        return planned.num_steps * self.step_s[side] + self.aside_s[side]

    def capacity_per_s(self, mix: Mix) -> float:
        """Return the images per second of full batches; decoding takes of the same core."""
        aside_s = sum(self.aside_s.values()) / len(self.aside_s)
        return 1 / (mix.mean_steps * self.image_s + aside_s)


def pool_of(sides_px: Sequence[int], max_batch: int) -> PoolConfig:
    """Return the configuration of the one replica."""
    return PoolConfig(
        name=MODEL,
        model=MODEL,
        max_batch=max_batch,
        max_in_flight=2 * max_batch,
        min_px=min(sides_px),
        max_px=max(sides_px),
    )


def measure_speed(pool: PoolConfig, sides_px: Sequence[int]) -> Speed:
    """Time the model's operations alone and in full batches."""
    prepare_threads(pool.num_threads)
    timer = OperationTimer(load_model(pool), time.monotonic, _REPEATS)
    encode_s = min(timer.encodes_s(1, guidance_scale=_GUIDANCE))
    sizes = [(side, side) for side in sides_px]
    full = [sizes[index % len(sizes)] for index in range(pool.max_batch)]
    return Speed(
        step_s={size[0]: min(timer.steps_s([size], guidance_scale=_GUIDANCE)) for size in sizes},
        aside_s={size[0]: encode_s + min(timer.decodes_s(size, 1)) for size in sizes},
        image_s=min(timer.steps_s(full, guidance_scale=_GUIDANCE)) / pool.max_batch,
    )


def run_live(
    pool: PoolConfig, speed: Speed, mix: Mix, load: float, count: int, seed: int
) -> dict[str, Any]:
    """Return the figures of one trace; it runs twice, the second time with nobody refused."""
    rate = load * speed.capacity_per_s(mix)
    trace = draw_trace(mix, count, rate_per_s=rate, alone_s=speed.alone_s, seed=seed)
    refusing, accepting = (asyncio.run(_run(pool, trace, late)) for late in _WHEN_LATE)
    return figures(refusing, accepting)


async def _run(pool: PoolConfig, trace: Sequence[Planned], when_late: WhenLate) -> list[Ended]:
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        config = ClusterConfig(
            pools=(pool,),
            dispatch=DispatchConfig(attached_timeout_s=_FOREVER_S, replica_timeout_s=600.0),
            limits=LimitsConfig(
                max_queue_s=1e9, max_queued_images=10**6, max_attached_images_per_client=10**6
            ),
            loras=LorasConfig(num_stores=0),
            storage=StorageConfig().resolved(Path(folder)),
        )
        async with LocalCell(config) as cell:
            service = cell.front.dispatch
            async with asyncio.timeout(_START_S):
                while not await service.models():  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.05)
            began_s = time.monotonic()
            return await asyncio.gather(
                *(
                    _ask(service, number, one, began_s, when_late)
                    for number, one in enumerate(trace)
                )
            )


async def _ask(
    service: DispatchService, number: int, planned: Planned, began_s: float, when_late: WhenLate
) -> Ended:
    await asyncio.sleep(max(0.0, began_s + planned.at_s - time.monotonic()))
    name = f"r{number}"
    request = ImageRequest(
        request_id=name,
        model=MODEL,
        prompt="a large red circle in the center on a black background",
        width_px=planned.side_px,
        height_px=planned.side_px,
        num_steps=planned.num_steps,
        guidance_scale=_GUIDANCE,
        sampler="ddim",
        seed=number,
        slo_s=planned.slo_s,
        when_late=when_late,
    )
    offer = await service.offer([request])
    if not offer.accepted:
        return Ended(is_accepted=False, slo_s=planned.slo_s)
    outcome = None
    while outcome is None:
        outcome = (await service.wait([name], _WAIT_S)).get(name)
    took_s = outcome.elapsed_s if isinstance(outcome, Completed) else None
    return Ended(True, planned.slo_s, offer.predicted_s, took_s)
