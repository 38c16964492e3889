"""Replicas of a model and of its ControlNets beside a dispatcher: the images are diffusers'."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from PIL import Image

from ray_cluster.cell.front import core_of
from ray_cluster.cell.kinds import build_skill
from ray_cluster.cell.worker import Worker
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import worker_arguments
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.models.builtin import weights_folder
from ray_cluster.protocol.leases import Returned
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.host import Host
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, Failure, ImageRequest
from ray_cluster.storage.inputs import OPEN_OWNER, InputStore
from tests.engine.random_controlnets import random_map
from tests.replica.setup import Link, Replica, offer, outcomes, until

pytestmark = pytest.mark.timeout(240)

NETS = {"edges": "shapes-sd-edges", "layout": "shapes-sd-layout"}
SIZES = ((64, 64), (96, 64), (64, 64), (128, 128))
USES: tuple[tuple[tuple[str, dict[str, float]], ...], ...] = (
    (("edges", {}),),
    (("layout", {"scale": 0.7, "end": 0.6}),),
    (),
    (("edges", {"start": 0.2}), ("layout", {"scale": 0.5})),
)


class ReplicaLink(Link):
    """With the settings that replicas start with."""

    async def pool_settings(self, _pool: str) -> None:
        """None: the defaults."""


@dataclass
class Cell:
    """A dispatcher, replicas, and the images that calls have sent.

    Attributes:
        config: whose pools and ControlNets they are.
    """

    config: ClusterConfig
    folder: Path
    coder: ImageCoder
    link: ReplicaLink
    workers: list[Worker]

    async def add_base(self, name: str = "base") -> Replica:
        skill = build_skill(worker_arguments(self.config, "shapes-sd"), None, self._host(name))
        return self._started(Replica(skill))

    async def add_control(self, net: str, name: str = "") -> Worker:
        skill = build_skill(worker_arguments(self.config, net), None, self._host(name or net))
        return self._started(Worker(skill))

    def _host(self, name: str) -> Host:
        return Host(name, "127.0.0.1", self.link, self.coder)  # type: ignore[arg-type]

    def _started(self, worker: Any) -> Any:
        worker.start()
        self.workers.append(worker)
        return worker

    async def remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        await worker.drain()

    def request(self, index: int, **changes: Any) -> ImageRequest:
        width, height = SIZES[index % len(SIZES)]
        values: dict[str, Any] = {
            "request_id": f"r{index}",
            "model": "shapes-sd",
            "prompt": "a large red circle left of a small blue square",
            "width_px": width,
            "height_px": height,
            "num_steps": 6,
            "guidance_scale": 2.0,
            "sampler": "ddim",
            "seed": index,
            "owner": OPEN_OWNER,
            "add_ons": AddOns(
                controls=tuple(
                    ControlNetUse(name, ref_of(png_of(a_map(index, place))), **fields)
                    for place, (name, fields) in enumerate(USES[index % len(USES)])
                )
            ),
        }
        return ImageRequest(**(values | changes))

    async def store(self, index: int) -> None:
        """Store the maps of a request, as gateways do."""
        inputs = InputStore.open(self.config.storage.inputs, grace_s=60.0)
        for place in range(len(USES[index % len(USES)])):
            data = png_of(a_map(index, place))
            assert await inputs.put(OPEN_OWNER, _whole(data), max_bytes=len(data)) == ref_of(data)


def a_map(index: int, place: int) -> Any:
    return random_map(10 * index + place, *SIZES[index % len(SIZES)])


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data


def png_of(array: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def content(folder: Path, mode: str) -> dict[str, Any]:
    return {
        "storage": {
            "jobs": f"sqlite:///{folder}/jobs.db",
            "results": str(folder / "results"),
            "states": str(folder / "states"),
            "inputs": str(folder / "inputs"),
        },
        "loras": {"folder": str(folder / "loras")},
        "dispatch": {"poll_s": 0.3, "replica_timeout_s": 60.0, "default_slo_s": 120.0},
        "pools": [{"name": "shapes-sd", "model": "shapes-sd", "max_px": 128, "max_batch": 4}],
        "controlnets": [
            {"name": name, "model": model, "bases": ["shapes-sd"], "mode": mode}
            for name, model in NETS.items()
        ],
    }


@asynccontextmanager
async def cell(folder: Path, coder: ImageCoder, mode: str = "service") -> AsyncIterator[Cell]:
    config = load_config(content(folder, mode))
    settings = settings_of(config)
    core = core_of(config)
    core.apply(settings, time.monotonic())
    service = DispatchService(core, config=settings.dispatch, clock=time.monotonic)
    found = Cell(config, folder, coder, ReplicaLink(service), [])
    for index in range(8):
        await found.store(index)
    try:
        yield found
    finally:
        for worker in found.workers:
            await worker.drain()
        await service.close()


@pytest.fixture(scope="module")
def coder() -> Iterator[ImageCoder]:
    with ImageCoder() as one:
        yield one


@cache
def truth(index: int) -> Any:
    """What diffusers makes of a request, ``[H, W, 3]``."""
    weights = weights_folder()
    uses = USES[index % len(USES)]
    nets = [ControlNetModel.from_pretrained(weights / NETS[name]) for name, _ in uses]
    # without any, one that does nothing
    nets = nets or [ControlNetModel.from_pretrained(weights / NETS["edges"])]
    pipeline = StableDiffusionControlNetPipeline.from_pretrained(
        weights / "shapes-sd", controlnet=nets, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    width, height = SIZES[index % len(SIZES)]
    fields = [one for _, one in uses] or [{"scale": 0.0}]
    return np.asarray(
        pipeline(
            "a large red circle left of a small blue square",
            image=[Image.fromarray(a_map(index, place)) for place in range(len(nets))],
            width=width,
            height=height,
            num_inference_steps=6,
            guidance_scale=2.0,
            controlnet_conditioning_scale=[float(one.get("scale", 1.0)) for one in fields],
            control_guidance_start=[float(one.get("start", 0.0)) for one in fields],
            control_guidance_end=[float(one.get("end", 1.0)) for one in fields],
            generator=torch.Generator().manual_seed(index),
        ).images[0]
    )


def check(found: dict[str, Outcome]) -> None:
    for request_id, outcome in found.items():
        gap = np.abs(pixels_of(outcome) - truth(int(request_id[1:])).astype(int)).max()
        assert gap <= 1, request_id


async def made(cell: Cell, requests: Sequence[ImageRequest]) -> dict[str, Outcome]:
    await offer(cell.link.service, requests)
    return await outcomes(cell.link.service, requests)


@pytest.mark.parametrize("mode", ["service", "local"])
async def test_images_through_services_are_diffusers(
    tmp_path: Path, coder: ImageCoder, mode: str
) -> None:
    """All in one batch: with one, the other, none and both, of three sizes."""
    async with cell(tmp_path, coder, mode) as here:
        if mode == "service":
            for name in NETS:
                await here.add_control(name)
        await here.add_base()
        check(await made(here, [here.request(index) for index in range(4)]))


@pytest.mark.slow
async def test_two_bases_share_the_replicas_of_a_controlnet(
    tmp_path: Path, coder: ImageCoder
) -> None:
    async with cell(tmp_path, coder) as here:
        for name in NETS:
            await here.add_control(name)
        await here.add_base("one")
        await here.add_base("two")
        check(await made(here, [here.request(index) for index in range(8)]))


async def test_a_request_waits_until_its_controlnet_is_there(
    tmp_path: Path, coder: ImageCoder
) -> None:
    async with cell(tmp_path, coder) as here:
        await here.add_base()
        requests = [here.request(0), here.request(2)]
        await offer(here.link.service, requests)
        found = await outcomes(here.link.service, requests[1:])
        assert not await here.link.service.wait(["r0"], 0.3)
        await here.add_control("edges")
        check(found | await outcomes(here.link.service, requests[:1]))


async def test_another_replica_goes_on_when_one_goes(tmp_path: Path, coder: ImageCoder) -> None:
    """Under way, the only replica goes and another comes; nothing is lost, the images equal."""
    async with cell(tmp_path, coder) as here:
        first = await here.add_control("edges", "first")
        await here.add_base()
        # 60 steps, so that it is gone in the middle
        long = [here.request(0, num_steps=60, request_id=f"r{4 * n}") for n in range(3)]
        await offer(here.link.service, long)
        await asyncio.sleep(0.3)
        await here.remove(first)
        await here.add_control("edges", "second")
        found = await outcomes(here.link.service, long)
        first_one, *others = map(pixels_of, found.values())
        # rounding depends on a batch
        assert all(np.abs(one - first_one).max() <= 1 for one in others)


async def test_a_request_whose_controlnet_has_gone_returns_to_the_queue_with_its_steps(
    tmp_path: Path, coder: ImageCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ray_cluster.replica.denoise.builder.RemoteControlNets",
        partial(RemoteControlNets, patience_s=0.2),
    )
    async with cell(tmp_path, coder) as here:
        first = await here.add_control("edges", "first")
        base = await here.add_base()
        one = here.request(0, num_steps=40, slo_s=3600.0)
        await offer(here.link.service, [one])
        await until(lambda: base.skill._runner.steps_done_by_id.get("r0", 0) > 2)
        await here.remove(first)
        await until(lambda: here.link.reported, "the return of the lease")
        (returned,) = here.link.reported
        assert isinstance(returned, Returned)
        assert returned.steps_done > 2
        await until(lambda: base.skill._runner.num_in_flight == 0)
        await here.add_control("edges", "second")
        assert isinstance((await outcomes(here.link.service, [one]))["r0"], Completed)


def pixels_of(outcome: Outcome) -> Any:
    assert isinstance(outcome, Completed), outcome
    return np.asarray(Image.open(io.BytesIO(outcome.result.data))).astype(int)


async def test_a_map_that_is_gone_fails_its_request_alone(
    tmp_path: Path, coder: ImageCoder
) -> None:
    async with cell(tmp_path, coder) as here:
        await here.add_control("edges")
        await here.add_base()
        bad = replace(
            here.request(0),
            request_id="bad",
            add_ons=AddOns(controls=(ControlNetUse("edges", BlobRef("0" * 64, 5)),)),
        )
        found = await made(here, [bad, here.request(0), here.request(2)])
        failure = found.pop("bad")
        assert isinstance(failure, Failure)
        assert failure.stage == "input"
        check(found)
