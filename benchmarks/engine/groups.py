"""What it costs that a model runs on several ranks: of a step on one, and of a change of ranks.

A machine without as many cores as ranks says nothing of how much faster wide sets are; `degrees`
shows what its ranks make of a step all the same.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.harness import Study
from ray_cluster.config.loading import set_environment
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.groups.degree_costs import DegreeCosts, Way
from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.engine.groups.group_executor import GroupExecutor, GroupModel
from ray_cluster.engine.groups.measuring import GroupTimer
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.models.loading import LoadedModel, load_model, start_states
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.sequence_parallel.rounds import plan_round
from ray_cluster.policies.types import DegreeCost, GroupCost, StepCost
from ray_cluster.replica.group.processes import start_child
from ray_cluster.replica.group.ranks import GroupRanks
from ray_cluster.requests import ImageRequest

_MODEL, _RANKS = "shapes-sd3", 4
_SIZES_PX = (64, 128)
_AIM_COORDINATION_MS, _AIM_SWITCH_MS = 1.5, 10.0
_NUM_STEPS = 40
_NEVER_S = 1e12
_COST = StepCost(0.001, 1.0)


def measure(study: Study) -> None:
    """Measure steps of one image at a time."""
    study.found["what"] = (
        f"steps of one image of {_MODEL} on {_RANKS} ranks, processes here (gloo), wall time"
    )
    rounds = study.pick(40, 4)
    with torch.inference_mode(), _group(PoolConfig(name="g", model=_MODEL, ranks=_RANKS)) as group:
        for side in _SIZES_PX:
            study.say(0.2, f"one rank, {side} px")
            row = _coordination(group, side, max(4, rounds // 5))
            study.row("one rank", **row)
            name = f"coordination, {side} px"
            study.at_most(name, _AIM_COORDINATION_MS, row["more_ms"], "ms a step")
        for side in _SIZES_PX:
            study.say(0.6, f"changes of ranks, {side} px")
            for row in switch_rows(group.timer, side, _RANKS, 4 * rounds):
                study.row("changes", **row)
                if row["change"] != "same":
                    name = f"switch: {row['change']}, {side} px"
                    study.at_most(name, _AIM_SWITCH_MS, row["p50_ms"], "ms")
        for side in (*_SIZES_PX, 256):
            study.say(0.9, f"degrees, {side} px")
            study.row("degrees", **_degrees(group.timer, side, rounds))
    for row in _barriers(4 * rounds):
        study.row("barriers of ranks that do nothing else", **row)


@dataclass(frozen=True, slots=True)
class _Group:
    ranks: GroupRanks
    model: LoadedModel
    news: threading.Event
    timer: GroupTimer

    def state(self, side: int, seed: int) -> RequestState:
        request = ImageRequest(
            request_id=f"r{seed}",
            model=_MODEL,
            prompt="a large blue star",
            width_px=side,
            height_px=side,
            num_steps=_NUM_STEPS,
            guidance_scale=1.0,
            sampler=self.model.profile.default_sampler,
            seed=seed,
        )
        (state,) = start_states(self.model, [request], now_s=0.0)
        return replace(state, deadline_s=_NEVER_S)

    def engine(self) -> GroupEngine:
        """Return an engine that steps on one rank."""
        executor = self.model.executor
        channels, patch = executor.latent_shape(64, 64)[0], executor.patch_multiple
        factor = 64 // executor.latent_shape(64, 64)[1]
        facts = GroupModel(executor.dtype, channels, patch, factor)
        cost = GroupCost(_RANKS, (DegreeCost(1, _COST),), factor * patch)
        costs = DegreeCosts([Way(1)], cost)
        return GroupEngine(
            GroupExecutor(facts, self.ranks),
            self.model.tables,
            time.monotonic,
            costs=costs,
            planner=plan_round,
        )


@contextmanager
def _group(pool: PoolConfig) -> Iterator[_Group]:
    model = load_model(pool.model_copy(update={"ranks": 1}))
    ranks, news = GroupRanks(pool.model_dump_json(), _RANKS, start_child), threading.Event()
    try:
        ranks.wait_up()
        ranks.call_when_news(news.set)
        yield _Group(ranks, model, news, GroupTimer(model, ranks, news))
    finally:
        ranks.close()


def _coordination(group: _Group, side: int, rounds: int) -> dict[str, Any]:
    """Compare whole runs on one rank with runs of the engine of this process, in turns."""
    seconds: dict[str, list[float]] = {"group": [], "one process": []}
    for number in range(rounds + 1):
        here = build_engine(group.model, max_batch=1, clock=time.monotonic)
        for name, engine in (("group", group.engine()), ("one process", here)):
            seconds[name].append(_run_s(group, engine, side, number) / _NUM_STEPS)
    # the first of each warms up
    pairs = zip(*(one[1:] for one in seconds.values()), strict=True)
    more_ms = [1e3 * (there - here) for there, here in pairs]
    return {
        "side_px": side,
        "group_ms": 1e3 * median(seconds["group"][1:]),
        "one_process_ms": 1e3 * median(seconds["one process"][1:]),
        "more_ms": {"value": median(more_ms), "low": min(more_ms), "high": max(more_ms)},
    }


def _run_s(group: _Group, engine: StepEngine, side: int, number: int) -> float:
    engine.add(group.state(side, number))
    began_s = time.perf_counter()
    while len(engine):
        if engine.can_step:
            engine.step()
        else:
            group.news.wait()
            group.news.clear()
    return time.perf_counter() - began_s


def switch_rows(timer: GroupTimer, side: int, num_ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Time steps after others on the same ranks, and after such on others: a row for each change.

    Args:
        num_ranks: of the widest set, a power of two above 1; the others have half of them.
    """
    half, every, other = range(num_ranks // 2), range(num_ranks), range(num_ranks // 2, num_ranks)
    changes = {
        "same": (half, half),
        "grow": (half, every),
        "shrink": (every, half),
        "move": (half, other),
    }
    taken: dict[str, list[float]] = {name: [] for name in changes}
    usual: dict[range, list[float]] = {}
    for _ in range(rounds):
        for name, (before, after) in changes.items():
            _step_s(timer, side, before)
            taken[name].append(_step_s(timer, side, after))
            usual.setdefault(after, []).append(_step_s(timer, side, after))
    return [
        _row(side, name, [1e3 * (one - median(usual[after])) for one in taken[name]])
        for name, (_, after) in changes.items()
    ]


def _step_s(timer: GroupTimer, side: int, ranks: range) -> float:
    return timer.steps_s((side, side), [(Way(len(ranks)), ranks)])[0]


def _row(side: int, name: str, more_ms: Sequence[float]) -> dict[str, Any]:
    cuts = quantiles(more_ms, n=100)
    return {"side_px": side, "change": name, "p50_ms": median(more_ms), "p99_ms": cuts[98]}


def _barriers(rounds: int) -> list[dict[str, Any]]:
    """Time what a change of ranks is compared with: barriers of idle ranks."""
    with tempfile.TemporaryDirectory(prefix="barriers-") as folder:
        spawn(_meet, (folder, rounds), nprocs=_RANKS)
        taken = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return [_row(0, f"barrier of {degree}", ms) for degree, ms in taken.items()]


def _meet(rank: int, folder: str, rounds: int) -> None:
    """Meet the other ranks again and again; the first one writes how long that took."""
    set_environment({"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS
    )
    groups, found = RankSets.build(rank, _RANKS, (2, 4), torch.device("cpu")).groups, {}
    for ranks in (range(2), range(4)):
        if rank in ranks:
            found[len(ranks)] = [_barrier_ms(groups[ranks]) for _ in range(rounds)]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _barrier_ms(group: dist.ProcessGroup) -> float:
    began_s = time.perf_counter()
    dist.barrier(group)
    return 1e3 * (time.perf_counter() - began_s)


def _degrees(timer: GroupTimer, side: int, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"side_px": side}
    for degree in (1, 2, 4):
        taken = [_step_s(timer, side, range(degree)) for _ in range(rounds)]
        row[f"degree_{degree}_ms"] = 1e3 * median(taken)
    return row
