"""Steps and streams of several image sizes: diffusers, ours by size, and ours in one batch.

One step of the same rows is taken in four ways: diffusers' float32 UNet row by row, its UNet once
per size, our executor once per size, and our executor once. Then a stream of requests of different
sizes and steps, prompts to pixels, by the pipeline one by one and by the engine.
"""

from __future__ import annotations

import copy
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from benchmarks.engine.streams import BASELINE, Way, by_engine, by_pipeline, compare
from benchmarks.engine.subject import Subject, bare_inputs, load_subject, make_requests
from benchmarks.settings import SCALES, Report, Settings
from benchmarks.stats import paired_ratio
from benchmarks.stopwatch import in_turns
from benchmarks.verdicts import at_least
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.warmup import measure_step_cost
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.policies.steps.batch_layout import BatchLayout, choose_layout
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]
# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 500
_STREAM_STEPS, _STREAM_IN_FLIGHT = (15, 20, 25), 8
# layouts whose times are nearer than this count as equal
_TIE = 0.03
BATCHES: dict[str, tuple[SizePx, ...]] = {
    "2: 64, 128": ((64, 64), (128, 128)),
    "4: 64, 64x128, 96, 128": ((64, 64), (64, 128), (96, 96), (128, 128)),
    "8: 64, 96, 128": ((64, 64),) * 3 + ((96, 96),) * 3 + ((128, 128),) * 2,
    "12: 64, 96, 128": ((64, 64),) * 4 + ((96, 96),) * 4 + ((128, 128),) * 4,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# aims of steps of 8 and 12 rows, and of streams, by the format that is computed in
_STEP_AIMS = {"float32": {False: 1.8, True: 1.4}, "bfloat16": {False: 2.4, True: 1.9}}
_STREAM_AIMS = {"float32": 1.6, "bfloat16": 2.0}


@dataclass(frozen=True, slots=True)
class Contest:
    """The same weights on both sides, in one dtype.

    Attributes:
        computes: what layers with weights of the dtype compute in on this CPU.
        subject: its pipeline is in float32; its model in the dtype.
        unet: diffusers', in the dtype.
        cost: of a step of ours, measured as a replica does at its start.
    """

    dtype: str
    computes: str
    subject: Subject
    unet: Any
    cost: StepCost


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Measure steps, then streams."""
    subject = load_subject()
    contests = [_contest(subject, dtype) for dtype in DTYPES]
    todo = list(product(contests, SCALES, BATCHES))
    cells, aims, streams, problems = [], [], [], []
    for index, (contest, scale, batch) in enumerate(todo):
        report(0.7 * index / len(todo), f"{batch} px, {contest.dtype}")
        cell = _step(contest, batch, scale, settings.size_rounds)
        cells.append(cell)
        aims += _step_aims(cell, contest.computes)
    for index, contest in enumerate(contests):
        report(0.7 + 0.3 * index / len(contests), f"stream, {contest.dtype}")
        [row], wrong = compare(_stream(contest, settings.stream_requests), settings.rounds)
        streams.append({"dtype": contest.dtype, **row})
        problems += wrong
        figures, name = row.get("speed_up_cpu"), f"stream of sizes and steps, {contest.dtype}"
        if figures:
            least = _STREAM_AIMS[contest.computes]
            aims.append(at_least(name, least, figures["median"], figures["ci95"], "x"))
    share = 100 * sum(cell["layout_is_faster"] for cell in cells) / len(cells)
    aims.append(at_least("faster layout chosen, of the cells", 90, share, (share, share), "%"))
    return {
        "what": "one step of the same rows over diffusers' float32 UNet row by row, and a stream "
        "over the float32 pipeline one by one; CPU time of one thread, in turns",
        "tables": {"steps": cells, "streams of 64, 96, 128 px and 15, 20, 25 steps": streams},
        "aims": [aim.as_dict() for aim in aims],
        "problems": problems,
    }


def _contest(subject: Subject, dtype: str) -> Contest:
    unet = copy.deepcopy(subject.pipeline.unet).to(DTYPES[dtype])
    executor = UNetExecutor(
        copy.deepcopy(unet),
        vae_scale_factor=subject.pipeline.vae_scale_factor,
        device=torch.device("cpu"),
    )
    model = replace(subject.model, executor=executor)
    cost = measure_step_cost(model, max_batch=8, clock=time.thread_time)
    computes = str(executor.dtype).removeprefix("torch.")
    return Contest(dtype, computes, replace(subject, model=model), unet, cost)


@torch.inference_mode()
def _step(contest: Contest, batch: str, scale: float, rounds: int) -> dict[str, Any]:
    """Take one step of the rows in every way, in turns."""
    states = _states(contest, batch, scale)
    by_size: dict[SizePx, list[RequestState]] = defaultdict(list)
    for state in states:
        by_size[state.request.size_px].append(state)
    unet = contest.subject.pipeline.unet
    alone = [_bare(contest, unet, torch.float32, [state]) for state in states]
    static = [
        _bare(contest, contest.unet, DTYPES[contest.dtype], alike) for alike in by_size.values()
    ]
    ways: dict[str, Callable[[], object]] = {
        BASELINE: lambda: [call() for call in alone],
        "static": lambda: [call() for call in static],
        "ours_by_size": _engine_step(contest, batch, scale, "grouped"),
        "ours_mixed": _engine_step(contest, batch, scale, "mixed"),
    }
    for way in ways.values():
        way()
    costs = {name: [cost.cpu_s for cost in found] for name, found in in_turns(ways, rounds).items()}
    ratio = paired_ratio(costs["ours_by_size"], costs["ours_mixed"])
    choice = choose_layout(len(by_size), contest.cost)
    is_tie = abs(ratio.median - 1) <= _TIE
    return {
        "rows_px": batch,
        "dtype": contest.dtype,
        "guidance": scale > 1,
        **{
            name: paired_ratio(costs[BASELINE], costs[name]).as_dict()
            for name in ways
            if name != BASELINE
        },
        "mixed_over_by_size": ratio.as_dict(),
        "layout": choice,
        "layout_is_faster": is_tie or (ratio.median > 1) == (choice == "mixed"),
    }


def _step_aims(cell: dict[str, Any], computes: str) -> Any:
    guided = f"guidance {'on' if cell['guidance'] else 'off'}"
    name = f"one step, {cell['rows_px']} px, {cell['dtype']}, {guided}"
    if cell["rows_px"].startswith(("8", "12")):
        figures, least = cell["ours_mixed"], _STEP_AIMS[computes][cell["guidance"]]
        yield at_least(name, least, figures["median"], figures["ci95"], "x")
    if cell["rows_px"].startswith("4") and not cell["guidance"]:
        figures = cell["mixed_over_by_size"]
        yield at_least(f"{name}, over by size", 1.25, figures["median"], figures["ci95"], "x")


def _states(contest: Contest, batch: str, scale: float) -> list[RequestState]:
    sizes = BATCHES[batch]
    plain = make_requests(len(sizes), px=64, num_steps=_NUM_STEPS, guidance_scale=scale)
    return contest.subject.start(_resized(plain, sizes))


def _bare(
    contest: Contest, unet: Any, dtype: torch.dtype, states: Sequence[RequestState]
) -> Callable[[], object]:
    """A call of diffusers' UNet for requests of one size, guidance rows included."""
    inputs = {
        name: tensor if name == "timestep" else tensor.to(dtype)
        for name, tensor in bare_inputs(contest.subject, states).items()
    }
    return lambda: unet(**inputs, return_dict=False)


def _engine_step(
    contest: Contest, batch: str, scale: float, layout: BatchLayout
) -> Callable[[], object]:
    """A whole engine step: policy, model and the samplers' update."""
    engine = build_engine(
        contest.subject.model,
        max_batch=len(BATCHES[batch]),
        clock=time.thread_time,
        layout=lambda _num_sizes: layout,
    )
    for state in _states(contest, batch, scale):
        engine.add(state)
    return engine.step


def _stream(contest: Contest, count: int) -> dict[str, Way]:
    rng = random.Random(11)
    steps = [rng.choice(_STREAM_STEPS) for _ in range(count)]
    sides = [rng.choice((64, 96, 128)) for _ in range(count)]
    plain = make_requests(count, px=64, num_steps=steps, guidance_scale=1.0)
    requests = _resized(plain, [(side, side) for side in sides])
    subject, is_exact = contest.subject, contest.dtype == "float32"
    return {
        BASELINE: Way(lambda: by_pipeline(subject.pipeline, requests, 1), count),
        "engine": Way(lambda: by_engine(subject, requests, _STREAM_IN_FLIGHT), count, is_exact),
    }


def _resized(requests: Sequence[ImageRequest], sizes: Sequence[SizePx]) -> list[ImageRequest]:
    return [
        replace(request, width_px=width, height_px=height)
        for request, (width, height) in zip(requests, sizes, strict=True)
    ]
