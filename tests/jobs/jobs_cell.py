"""A dispatcher's services with a job store, and replicas that make images of nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_cluster.cell.front import Front, Identity, Stores
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig, StorageConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.slices import front_arguments
from ray_cluster.errors import Stage
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.calling.interface import methods_of
from ray_cluster.protocol.controller import PlanCalls
from ray_cluster.protocol.dispatcher import CellCalls, ImageCalls, JobCalls, LoraCalls
from ray_cluster.protocol.jobs import Job
from ray_cluster.protocol.leases import Failed, Finished, Lease, Poll, Scored, Shown
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.requests import (
    Failure,
    ImageResult,
    OutputSpec,
    SmallImage,
    Timing,
    candidate_name,
)
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore
from tests.fakes import image_request, registration

MODELS = ("m", "shapes")
CONFIG = ClusterConfig.model_validate(
    {
        "pools": [
            {"name": name, "model": "shapes-sd", "served_as": name} for name in ("m", "shapes")
        ],
        "dispatch": {"poll_s": 0.05, "replica_timeout_s": 30.0, "attached_timeout_s": 60.0},
        "loras": {"num_stores": 0},
        "control": {"enabled": True},
    }
)
TIMING = Timing(queue_s=0.1, encode_s=0.2, denoise_s=0.3, decode_s=0.4)


def job(job_id: str, num_images: int = 1, **changes: Any) -> Job:
    """A job of client "alice", as the API would hand it over."""
    values: dict[str, Any] = {
        "client": "alice",
        "requests": tuple(
            image_request(f"{job_id}-{index}", output=OutputSpec(is_stored=True))
            for index in range(num_images)
        ),
        "slo_s": 60.0,
        "created_s": time.time(),
        "body_digest": "digest",
        "images": (None,) * num_images,
    }
    return Job(job_id=job_id, **{**values, **changes})


class JobsCell:
    """One life of a front over stores that outlive it; also the gateway's way to it.

    Attributes:
        waits: whether entering it waits until earlier jobs are restored.
    """

    waits = True

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int = 1,
        cell: str = "cell",
        service: str | None = None,
        store: Any = None,
        retention_s: float = 1e6,
        max_queued: int = 64,
        max_open: int = 100,
        limits: LimitsConfig | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or LimitsConfig(max_queued_images=max_queued)
        config = CONFIG.model_copy(
            update={
                "limits": limits.model_copy(update={"max_open_jobs_per_client": max_open}),
                "storage": StorageConfig(retention_s=retention_s),
                "dispatch": CONFIG.dispatch.model_copy(update={"service": service}),
            }
        )
        self.results = BlobStore(str(folder / "results"))
        self.inputs = InputStore(
            BlobStore(str(folder / "inputs")),
            grace_s=StorageConfig().inputs_grace_s,
            wall_clock=wall_clock,
        )
        self.store = store or SqlJobStore.open(f"sqlite:///{folder}/jobs.db")
        self.front = Front(
            front_arguments(config),
            config,
            Stores(self.store, self.results, self.inputs, BlobStore(str(folder / "states"))),
            # a later life takes the store over
            identity=Identity(cell, epoch),
            wall_clock=wall_clock,
        )
        self.core, self.dispatch = self.front.core, self.front.dispatch
        self.jobs_service, self.cell = self.front.jobs, self.front.cell
        self.settings_book, self.restored = self.front.settings.book, self.front.restored
        for interface in (ImageCalls, JobCalls, CellCalls, LoraCalls, PlanCalls):
            for name in methods_of(interface):
                setattr(self, name, getattr(self.front.services[interface], name))

    def add_controlnets(self, *names: str, base: str = "shapes") -> None:
        """Let there be ControlNets of a model, which its replicas run themselves."""
        self.core.controls.apply(
            [ControlNetConfig(name=name, model="m", bases=(base,), mode="local") for name in names]
        )

    async def __aenter__(self) -> JobsCell:
        await self.front.start()
        if self.waits:
            await self.restored.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.front.stop()


class Replica:
    """Registers with a cell, and makes what it leases when it is told to."""

    def __init__(self, cell: JobsCell, replica_id: str = "r", model: str = "m") -> None:
        self.cell = cell
        self.replica_id = replica_id
        self.model = model
        self.leases: dict[str, Lease] = {}
        self.steps_done = 0

    async def register(self, **changes: Any) -> Replica:
        self.epoch = await self.cell.dispatch.register(
            replace(registration(self.replica_id, self.model), **changes)
        )
        return self

    async def poll(self) -> dict[str, Lease]:
        """Poll once; return what it holds now."""
        named = dict.fromkeys(self.leases, self.steps_done)
        reply = await self.cell.dispatch.poll(
            Poll(self.replica_id, self.epoch, 4 - len(named), named)
        )
        for request_id in reply.aborts:
            self.leases.pop(request_id, None)
        for request_id, fence in reply.adopted.items():
            self.leases[request_id] = replace(self.leases[request_id], fence=fence)
        self.leases.update({lease.request.request_id: lease for lease in reply.leases})
        return self.leases

    async def finish(self, lease: Lease, data: bytes = b"image") -> None:
        request = lease.request
        del self.leases[request.request_id]
        is_stored = request.output.is_stored
        if is_stored:
            name = request.file_id
            name = candidate_name(request.request_id) if lease.is_candidate else name
            self.cell.results.put(name, data)
        result = ImageResult(
            request.request_id,
            b"" if is_stored else data,
            request.output.image_format,
            TIMING,
            len(data),
        )
        small = SmallImage(1, 1, b"rgb") if lease.is_candidate else None
        event = Finished(request.request_id, lease.fence, result, small)
        await self.cell.dispatch.report(self.replica_id, [event])

    async def score(self, lease: Lease, confidence: float) -> None:
        """Answer as a discriminator."""
        request_id = lease.request.request_id
        del self.leases[request_id]
        event = Scored(request_id, lease.fence, confidence)
        await self.cell.dispatch.report(self.replica_id, [event])

    async def show(self, lease: Lease, index: int, data: bytes = b"preview") -> None:
        request = lease.request
        if request.output.is_stored:
            self.cell.results.put(request.preview_file_id(index), data)
            data = b""
        shown = Shown(
            request.request_id,
            lease.fence,
            Preview(index, self.steps_done, request.num_steps, data),
        )
        await self.cell.dispatch.show(self.replica_id, shown)

    async def fail(self, lease: Lease, stage: Stage = "denoise") -> None:
        request_id = lease.request.request_id
        del self.leases[request_id]
        failure = Failure(request_id, "error", "out of luck", stage)
        await self.cell.dispatch.report(self.replica_id, [Failed(request_id, lease.fence, failure)])

    async def work(self) -> None:
        """Make everything, for ever."""
        while True:
            await self.poll()
            for lease in list(self.leases.values()):
                await self.finish(lease)


async def until(condition: Callable[[], Any], patience_s: float = 60.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        await asyncio.sleep(0.005)
