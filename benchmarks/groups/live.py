"""A service with a group of paced ranks, which serves workloads under one policy after another."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import diffusers
import httpx
import torch
import uvicorn

from benchmarks.groups import paced_rank
from benchmarks.groups.published import CLASSES, NUM_RANKS, NUM_STEPS, StepTimes
from ray_cluster.cell.local import LocalCell
from ray_cluster.config.loading import load_config
from ray_cluster.engine.stages import denoise_stage
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.sequence_parallel.types import (
    DegreeMenu,
    GroupView,
    Planner,
    RoundDecision,
)
from ray_cluster.replica.group import builder
from ray_cluster.replica.group.processes import start_child
from ray_cluster.simulator.groups.policies import planner_of

# pixels of the image for each of its latents'
_PIXELS = 16
_PATIENCE_S = 600.0
_WAKE_S = 0.01


class Ask(NamedTuple):
    """One request: seconds from the beginning of its workload, and its side in pixels."""

    arrival_s: float
    side_px: int


class Unit(NamedTuple):
    """A workload under a policy.

    Attributes:
        name: of the policy in the results.
        policy: that it stands for, as the simulator knows it.
    """

    name: str
    policy: str
    seed: int
    asks: tuple[Ask, ...]


class Served(NamedTuple):
    """What became of a unit.

    Attributes:
        seconds: from each request's arrival to its image; None where its client has left.
        steps_by_degree: of all images that came.
    """

    unit: Unit
    seconds: tuple[float | None, ...]
    steps_by_degree: dict[int, int]

    @property
    def percent(self) -> float:
        """Of its requests that were on time."""
        return 100 * fmean(one is not None for one in self.seconds)


class Ready(NamedTuple):
    """A service that is warm.

    Attributes:
        tail_s: by side, the median of seconds that an image alone takes beside its steps.
        ratios: by side and degree, seconds of a step as the service has learnt them, over those
            that it is to last.
    """

    tail_s: dict[int, float]
    ratios: dict[str, float]


class Over(NamedTuple):
    """A service that has ended.

    Attributes:
        real: of each step of each rank, its own seconds over those that it was to last.
    """

    real: tuple[float, ...]


Found = Ready | Served | Over


class _Policies:
    """The planner of a group, which can be another one later on."""

    def __init__(self) -> None:
        self.planner: Planner = plan_round
        # as the service believes them to be, by size
        self.menus: dict[str, DegreeMenu] = {}

    def __call__(self, view: GroupView, **_options: RoundOptions) -> RoundDecision:
        self.menus |= {one.menu.slo_class: one.menu for one in view.requests}
        return self.planner(view)


def live_planner(policy: str, times: StepTimes) -> Planner:
    """Return a policy of the simulator for the service; ours drops nothing there."""
    if policy == "rounds/large":
        return partial(plan_round, options=RoundOptions("large", drops=False))
    menus = {f"{one}x{one}": times.menu(one, 0.0) for one in CLASSES}
    planner = planner_of(policy, menus)
    return _Grid(planner).plan if policy.endswith("grid") else planner


class _Grid:
    """Rounds on a grid, in a service that looks a little later than at its edges."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._next_s = 0.0

    def plan(self, view: GroupView) -> RoundDecision:
        if view.now_s >= self._next_s > 0:
            view = replace(view, now_s=self._next_s)
        decision = self._planner(view)
        self._next_s = decision.look_again_s
        return decision


def run(units: Queue[Unit | None], found: Queue[Found], times: StepTimes, pace: float) -> None:
    """Serve units until there is None; in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="groups-") as name:
        asyncio.run(_run(Path(name), units, found, times, pace))


async def _run(
    folder: Path, units: Queue[Unit | None], found: Queue[Found], times: StepTimes, pace: float
) -> None:
    policies = _Policies()
    setattr(builder, "plan_round", policies)  # noqa: B010 - a group asks for no other one
    # rounds begin at instants, and no news of a rank wakes the group then
    setattr(denoise_stage, "_IDLE_WAKE_S", _WAKE_S)  # noqa: B010
    async with _serving(folder, times) as client:
        found.put(await _warm_up(client, policies, times))
        num_warm = len(_real(folder))
        while (unit := await asyncio.to_thread(units.get)) is not None:
            policies.planner = live_planner(unit.policy, times)
            found.put(await _served(client, unit, pace))
            # steps of requests that have left
            await asyncio.sleep(times.step_s(1, max(CLASSES) ** 2))
        found.put(Over(_real(folder)[num_warm:]))


def _real(folder: Path) -> tuple[float, ...]:
    """Return each step's own seconds over those that it was to last, in the order of their ends."""
    lines = [
        line.split()
        for path in folder.glob("[0-9]*")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return tuple(float(took) / float(lasts) for _, lasts, took in sorted(lines))


@asynccontextmanager
async def _serving(folder: Path, times: StepTimes) -> AsyncIterator[httpx.AsyncClient]:
    os.environ |= {
        paced_rank.TERMS: json.dumps(times.terms),
        paced_rank.FOLDER: str(folder),
        paced_rank.PIXELS: str(_PIXELS),
    }
    start = partial(start_child, module=paced_rank.__name__)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with LocalCell(load_config(_document(folder)), start_rank=start) as cell:
            settings = uvicorn.Config(cell.app, log_level="critical", lifespan="off")
            server = uvicorn.Server(settings)
            serving = asyncio.create_task(server.serve([listener]))
            limits = httpx.Limits(max_connections=None)
            try:
                async with httpx.AsyncClient(
                    base_url=url, timeout=_PATIENCE_S, limits=limits
                ) as client:
                    yield client
            finally:
                server.should_exit = server.force_exit = True
                await serving


def _document(folder: Path) -> dict[str, Any]:
    pool = {
        "name": "group",
        "model": str(_one_layer(folder / "model")),
        "ranks": NUM_RANKS,
        "num_threads": 1,
        "min_px": min(CLASSES),
        "max_px": max(CLASSES),
        "max_in_flight": 64,
        "defaults": {"size": "128x128", "num_inference_steps": NUM_STEPS, "guidance_scale": 1.0},
    }
    store = folder / "store"
    return {
        "http": {"open": True},
        "storage": {
            "jobs": f"sqlite:///{store}/jobs.db",
            **{name: str(store / name) for name in ("results", "states", "inputs")},
        },
        "pools": [pool],
    }


def _one_layer(folder: Path) -> Path:
    """Write shapes-sd3 with one random layer: its steps must be short."""
    source = builtin_folder("shapes-sd3")
    assert source is not None, "it comes with the package"
    shutil.copytree(source, folder)
    config = json.loads((folder / "transformer/config.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder / "transformer")
    torch.manual_seed(0)
    model = diffusers.SD3Transformer2DModel.from_config(config | {"num_layers": 1})
    model.save_pretrained(folder / "transformer")
    return folder


async def _warm_up(client: httpx.AsyncClient, policies: _Policies, times: StepTimes) -> Ready:
    """Have the service learn what steps cost, and time images alone."""
    tails: dict[int, list[float]] = {side_px: [] for side_px in CLASSES}
    for degree in times.terms:
        policies.planner = live_planner(f"fixed/{degree}", times)
        for side_px in CLASSES:
            began_s = time.monotonic()
            await _image(client, side_px)
            steps_s = NUM_STEPS * times.step_s(degree, side_px**2)
            tails[side_px].append(time.monotonic() - began_s - steps_s)
    ratios = {
        f"{side_px} px, degree {degree}": seconds / times.step_s(degree, side_px**2)
        for side_px in CLASSES
        for menu in (policies.menus[f"{side_px}x{side_px}"],)
        for degree, seconds in zip(menu.degrees, menu.step_s, strict=True)
    }
    return Ready({side_px: median(seconds) for side_px, seconds in tails.items()}, ratios)


async def _served(client: httpx.AsyncClient, unit: Unit, pace: float) -> Served:
    """Send a workload, each request at its time; its client leaves at its deadline."""
    began_s = time.monotonic()

    async def ask(one: Ask) -> tuple[float | None, dict[int, int]]:
        await asyncio.sleep(one.arrival_s)
        slo_s = pace * CLASSES[one.side_px]
        try:
            async with asyncio.timeout(slo_s):
                degrees = await _image(client, one.side_px, slo_s)
        except TimeoutError:
            return None, {}
        return time.monotonic() - began_s - one.arrival_s, degrees

    found = await asyncio.gather(*map(ask, unit.asks))
    steps = Counter[int]()
    for _, degrees in found:
        steps.update(degrees)
    return Served(unit, tuple(seconds for seconds, _ in found), dict(steps))


async def _image(
    client: httpx.AsyncClient, side_px: int, slo_s: float = _PATIENCE_S
) -> dict[int, int]:
    """Return the steps of an image by their degrees."""
    body = {"model": "group", "prompt": "a red circle", "size": f"{side_px}x{side_px}"}
    reply = await client.post("/v1/images/generations", json=body | {"slo_s": slo_s})
    reply.raise_for_status()
    [image] = reply.json()["data"]
    return {int(degree): count for degree, count in image["steps_by_degree"].items()}
