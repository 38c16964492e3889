"""A whole cell in one process: the HTTP API, a dispatcher with jobs, and real engines.

One image at a time is made to be cancelled, in the company of others that are made again and again
and must come out as ever.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.storage.blob_store import BlobStore
from tests.engine.staged import PATIENCE_S, StagedModel
from tests.fakes import sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell
from tests.replica.setup import BY_ID, REQUESTS, Link, Replica, check_image, new_worker, until

Way = Literal["delete", "gone"]
Held = Literal["encode", "denoise", "decode", "coding"]

SEED = 777
CONFIG = ClusterConfig.model_validate({"pools": [{"name": "m", "model": "unused"}]})


class Doorkeeper:
    """Stops the image that is to be cancelled where it enters a stage; others pass.

    Its id is not known beforehand: it is the one that is not among the company's.
    """

    def __init__(self, coder: ImageCoder) -> None:
        self._coder = coder
        self._stage: Held | None = None
        self.arrived = threading.Event()
        self._opened = threading.Event()

    def stop_at(self, stage: Held) -> None:
        self.arrived.clear()
        self._opened.clear()
        self._stage = stage

    def open(self) -> None:
        self._stage = None
        self._opened.set()

    def before(self, stage: str, ids: Sequence[str]) -> None:
        """The hook of a staged model."""
        if stage == self._stage and any(one not in BY_ID for one in ids):
            self.arrived.set()
            assert self._opened.wait(PATIENCE_S)

    def submit(self, pixels: Any, spec: Any, recipe: Any, *more: Any) -> Future[bytes]:
        """The coder, as the delivery knows it."""
        coding = self._coder.submit(pixels, spec, recipe, *more)
        if self._stage != "coding" or recipe["seed"] != str(SEED):
            return coding
        held: Future[bytes] = Future()

        def hand_on() -> None:
            assert self._opened.wait(PATIENCE_S)
            held.set_result(coding.result(PATIENCE_S))

        threading.Thread(target=hand_on, daemon=True).start()
        self.arrived.set()
        return held


@dataclass
class Figures:
    """What was measured of the cancels so far, in steps of the engine that the row took part in.

    Attributes:
        after_call: begun after the cancel was called.
        after_answer: begun after it was answered.
    """

    after_call: list[int] = field(default_factory=list)
    after_answer: list[int] = field(default_factory=list)


class CancelCell:
    """The running cell.

    Args:
        folder: of its stores.
        model: what all its replicas share.
    """

    def __init__(self, folder: Path, model: StagedModel, coder: ImageCoder, pixels: Any) -> None:
        self._model, self._pixels = model, pixels
        self.door = Doorkeeper(coder)
        model.before.append(self.door.before)
        self.cell = JobsCell(folder)
        self.link = Link(self.cell.dispatch)
        self.states = BlobStore(str(folder / "states"))
        core = self.cell.core
        self._left = StateSweeper(
            self.states, knows=core.knows, note_stored=core.note_stored, wall_clock=time.time
        )
        self.cell.dispatch._on_outcome = self._left.on_outcome
        app = create_app(
            self.cell, settings_for(CONFIG), results=self.cell.results, images=sent_images()
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://gateway")
        self.workers: list[Replica] = []
        self.num_made = 0
        # what other tests of this process still hold
        self._num_states = num_states()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CancelCell]:
        async with self.cell, self._http:
            self._left.start()
            try:
                yield self
            finally:
                self.door.open()
                for worker in self.workers:
                    await worker.drain()
                await self._left.close()

    async def add_replica(self, replica_id: str) -> Replica:
        worker = new_worker(
            self._model,
            self.link,
            self.door,
            replica_id,
            blobs=self.states,
            every=2,
            results=self.cell.results,
        )
        worker.start()
        self.workers.append(worker)
        await until(lambda: replica_id in self.cell.core.replicas, "its registration")
        return worker

    @asynccontextmanager
    async def company(self, count: int = 3) -> AsyncIterator[None]:
        """Have others made all the while, each as it always is."""
        ending = asyncio.Event()
        tasks = [asyncio.create_task(self._make(one, ending)) for one in REQUESTS[:count]]
        try:
            yield
        finally:
            ending.set()
            await asyncio.gather(*tasks)

    async def _make(self, one: Any, ending: asyncio.Event) -> None:
        while not ending.is_set():
            assert (await self.cell.dispatch.offer([one])).accepted
            found: dict[str, Any] = {}
            while not found:
                found = await self.cell.dispatch.wait([one.request_id], 5.0)
            assert isinstance(found[one.request_id], Completed)
            check_image(found[one.request_id], self._pixels)
            self.num_made += 1

    async def begin(self, way: Way, num_steps: int) -> Cancellable:
        """Have an image asked for, as a job or by a call that waits for it."""
        known = {record.view.request_id for record in self.cell.core._ledger}
        body = {"prompt": "a red circle", "seed": SEED, "num_inference_steps": num_steps}
        body |= {"size": "64x64", "slo_s": 600}
        call, job_id = None, ""
        if way == "delete":
            reply = await self._http.post("/v1/jobs", json=body)
            assert reply.status_code == 202, reply.text
            job_id = reply.json()["id"]
        else:
            # stored, too, but by no job that would see to its file
            body |= {"response_format": "url"}
            call = asyncio.create_task(self._http.post("/v1/images/generations", json=body))

        def new() -> set[str]:
            ids = {record.view.request_id for record in self.cell.core._ledger}
            return ids - known - BY_ID.keys()

        await until(new, "the request")
        (request_id,) = new()
        return Cancellable(self._http, request_id, job_id, call)

    def steps(self) -> list[tuple[str, ...]]:
        """The ids in every denoising step that was begun."""
        return [ids for stage, ids in self._model.calls if stage == "denoise"]

    async def first_step(self, one: Cancellable) -> None:
        await until(
            lambda: any(one.request_id in ids for ids in self.steps()), "the request's first step"
        )

    async def more_steps(self, count: int) -> None:
        """Wait until others have taken some steps, which show whether a row takes part."""
        end = len(self.steps()) + count
        await until(lambda: len(self.steps()) > end, "the others' steps")

    async def is_gone(self, one: Cancellable) -> None:
        await until(lambda: not self.holds(one.request_id), "its end")

    def holds(self, request_id: str) -> bool:
        """Whether any replica, or the dispatcher, has anything of a request."""
        return self.cell.core.knows(request_id) or any(
            request_id in worker.skill.leases or request_id in worker.skill._runner.steps_done_by_id
            for worker in self.workers
        )

    def take_figures(self, request_id: str, called: int, answered: int, to: Figures) -> None:
        """Note the steps that a cancelled row has taken part in."""
        last = max((i + 1 for i, ids in enumerate(self.steps()) if request_id in ids), default=0)
        to.after_call.append(max(0, last - called))
        to.after_answer.append(max(0, last - answered))

    async def nothing_is_left(self) -> None:
        """Nothing waits, is leased, is on its way through a stage, or lies in a store."""
        await until(
            lambda: all(worker.skill._runner.num_in_flight == 0 for worker in self.workers),
            "the end of all tickets",
        )
        await until(lambda: not list(self.states.entries()), "the end of all states")
        await until(lambda: not list(self.cell.results.entries()), "the end of all images")
        snapshot = await self.cell.dispatch.snapshot()
        assert (snapshot.num_waiting, snapshot.num_leased) == (0, 0)
        await until(lambda: num_states() <= self._num_states, "the end of all states in memory")
        await until(
            lambda: (
                not any(
                    worker.skill.leases or worker.skill._endings.tasks for worker in self.workers
                )
            ),
            "the end of all leases and codings",
        )


class Cancellable:
    """An image that was asked for."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        request_id: str,
        job_id: str,
        call: asyncio.Task[httpx.Response] | None,
    ) -> None:
        self._http, self._job_id, self._call = http, job_id, call
        self.request_id = request_id

    async def cancel(self) -> None:
        """Cancel it as its client does: by the job's DELETE, or by going away."""
        if self._call is None:
            reply = await self._http.delete(f"/v1/jobs/{self._job_id}")
            assert reply.json()["state"] == "cancelled", reply.text
            return
        assert not self._call.done()
        # as Serve does when a connection closes
        self._call.cancel()
        await asyncio.gather(self._call, return_exceptions=True)


def num_states() -> int:
    """Return how many states of requests live in this process."""
    gc.collect()
    return sum(type(one) is RequestState for one in gc.get_objects())


def memory_mib() -> float:
    return float(psutil.Process().memory_full_info().pss) / 2**20
