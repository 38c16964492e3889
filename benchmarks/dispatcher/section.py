"""CPU time per request and requests per second of one dispatcher, by replicas and queue."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.dispatcher.fakes import Meter, call_attached, create_jobs, run_replica
from benchmarks.harness import MODEL, Study
from ray_cluster.cell.front import Front, Identity, Stores
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig, StorageConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import front_arguments
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.jobs.service import JobService

Kind = Literal["attached", "durable"]
KINDS: tuple[Kind, ...] = ("attached", "durable")
SLOTS = 4
_DEPTH_REPLICAS = 64
_SAMPLE_S = 0.05
_WARM_UP_S = 40.0
# jobs in flight beyond this only wait for the store, all for the same write
_MOST_JOBS = 256
_PATIENCE_S = 20.0
# share of the pace of the replicas that counts as keeping it
_PACE = 0.9
# share of a core at which a dispatcher counts as full: the rest is for what comes in bursts
FULL_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Case:
    """What one row of the table measures.

    Attributes:
        image_s: how long a replica holds an image; 0 makes the dispatcher the bottleneck.
        depth: requests in the queue besides those in the replicas' slots.
    """

    kind: Kind
    replicas: int
    image_s: float = 0.0
    depth: int = 0

    @property
    def clients(self) -> int:
        """Calls in flight: they fill all replicas and the queue; jobs only as many as help."""
        wanted = self.replicas * SLOTS + self.depth
        return wanted if self.kind == "attached" else min(wanted, _MOST_JOBS)


def cases(study: Study) -> list[Case]:
    """Return the rows: by replicas, with a deep queue, and at the pace of real images."""
    counts, image_s = study.pick((1, 8, 64, 512), (1, 8)), study.pick(2.0, 0.2)
    deep = min(_DEPTH_REPLICAS, max(counts))
    return [
        *(Case(kind, count) for kind in KINDS for count in counts),
        # jobs wait for the store first: their queue is never deep
        Case("attached", deep, depth=study.pick(1000, 50)),
        *(
            Case(kind, count, image_s)
            for kind in KINDS
            for count in counts
            if count >= deep and (kind == "attached" or count * SLOTS <= _MOST_JOBS)
        ),
    ]


def measure(study: Study) -> None:
    """Measure every case, and what follows for the size of a cell."""
    study.found["what"] = (
        "CPU time of the dispatch and job services (SQLite included, Ray and Serve not), replicas "
        f"with {SLOTS} slots that compute nothing"
    )
    rows = []
    for case in study.each(cases(study)):
        with tempfile.TemporaryDirectory(prefix="dispatcher-") as folder:
            row = asyncio.run(_run(case, Path(folder), study.pick(5.0, 0.3)))
            rows.append(study.row("CPU and pace", **row))
    for kind in KINDS:
        title = f"GPUs of a cell ({SLOTS} images at a time each, a core full at {FULL_SHARE:.0%})"
        study.row(title, **capacity(rows, kind))


async def _run(case: Case, folder: Path, duration_s: float) -> dict[str, Any]:
    meter = Meter()
    async with services(folder) as (core, dispatch, jobs):
        replicas = [
            run_replica(dispatch, meter, number=number, slots=SLOTS, image_s=case.image_s)
            for number in range(case.replicas)
        ]
        is_attached = case.kind == "attached"
        clients = [
            call_attached(dispatch, meter) if is_attached else create_jobs(jobs, meter)
            for _ in range(case.clients)
        ]
        tasks = [asyncio.create_task(one) for one in replicas]
        try:
            tasks += await _start_spread(clients, over_s=case.image_s)
            # the first calls of all come nearly at once: nothing is typical before they are done
            for _ in range(round(_WARM_UP_S / _SAMPLE_S)):
                if meter.completed >= case.clients:
                    break
                await asyncio.sleep(_SAMPLE_S)
            row = await _window(case, core, meter, max(duration_s, case.image_s))
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
    if errors:
        raise RuntimeError(f"a fake died: {errors[0]!r}") from None
    return row


async def _start_spread(
    lives: Sequence[Coroutine[Any, Any, None]], over_s: float
) -> list[asyncio.Task[None]]:
    """Start clients evenly over a time, so that their images do not end together."""
    tasks, started_s = [], time.perf_counter()
    for index, life in enumerate(lives):
        tasks.append(asyncio.create_task(life))
        if time.perf_counter() - started_s < over_s * index / len(lives):
            await asyncio.sleep(over_s / len(lives))
    return tasks


async def _window(
    case: Case, core: DispatchCore, meter: Meter, duration_s: float
) -> dict[str, Any]:
    """Measure for ``duration_s``, and until every client has had an image in it.

    Clients that wait for the same store fall into step: all write, then all end.
    """
    depths: list[int] = []
    completed, polls, fakes_s = meter.completed, meter.polls, meter.fakes_s
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    ends_s = (wall_s + duration_s, wall_s + duration_s + _PATIENCE_S)
    turn = completed + case.clients
    while time.perf_counter() < ends_s[0] or (
        meter.completed < turn and time.perf_counter() < ends_s[1]
    ):
        await asyncio.sleep(_SAMPLE_S)
        depths.append(core.num_waiting)
    own_s = time.process_time() - cpu_s - (meter.fakes_s - fakes_s)
    took_s = time.perf_counter() - wall_s
    done = max(1, meter.completed - completed)
    return {
        "kind": case.kind,
        "replicas": case.replicas,
        "image_s": case.image_s,
        "mean_queue": round(sum(depths) / len(depths), 1),
        "requests": done,
        "requests_per_s": round(done / took_s, 2),
        "requests_per_cpu_s": round(done / own_s, 1),
        "cpu_ms_per_request": round(1e3 * own_s / done, 4),
        "polls_per_request": round((meter.polls - polls) / done, 2),
        "share_of_a_core": round(own_s / took_s, 3),
        "refused": meter.refused,
    }


@asynccontextmanager
async def services(
    folder: Path,
) -> AsyncIterator[tuple[DispatchCore, DispatchService, JobService]]:
    """Start a dispatcher's services over an empty job store."""
    # all fakes are one client, which no limit should stop here
    limits = LimitsConfig(
        max_queued_images=100_000,
        max_queue_s=1e9,
        max_open_jobs_per_client=100_000,
        max_attached_images_per_client=100_000,
    )
    storage = StorageConfig().resolved(folder)
    pools = (PoolConfig(name=MODEL, model=MODEL),)
    config = ClusterConfig(pools=pools, limits=limits, storage=storage)
    arguments = front_arguments(config)
    front = Front(arguments, config, Stores.open(arguments.storage), identity=Identity(epoch=1))
    await front.start()
    try:
        yield front.core, front.dispatch, front.jobs
    finally:
        await front.stop()


def capacity(rows: list[dict[str, Any]], kind: Kind) -> dict[str, Any]:
    """Return the GPUs that one dispatcher can serve, from the rows at the pace of real images.

    The largest row that keeps the pace gives the cost of a GPU, its polls included. A row that does
    not keep it gives the largest rate, whatever the CPU would still allow.
    """
    paced = [row for row in rows if row["kind"] == kind and row["image_s"]]
    image_s = paced[0]["image_s"]
    per_gpu_s = SLOTS / image_s
    in_pace = [row for row in paced if row["requests_per_s"] >= _PACE * row["replicas"] * per_gpu_s]
    bounds = {}
    if in_pace:
        most = max(in_pace, key=lambda row: int(row["replicas"]))
        bounds["cpu"] = FULL_SHARE * most["replicas"] / most["share_of_a_core"]
    if len(in_pace) < len(paced):
        bounds["rate"] = FULL_SHARE * max(row["requests_per_s"] for row in paced) / per_gpu_s
    by = min(bounds, key=lambda name: bounds[name])
    return {"kind": kind, "gpus": int(bounds[by]), "bound_by": by, "image_s": image_s}
