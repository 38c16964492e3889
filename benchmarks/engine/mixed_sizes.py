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

from benchmarks.engine.subject import (
    BASELINE,
    Subject,
    bare_inputs,
    by_engine,
    by_pipeline,
    load_subject,
    make_requests,
)
from benchmarks.figures import Figure
from benchmarks.harness import SCALES, Case, Row, Study, ratio
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.warmup import measure_step_cost
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.policies.steps.batch_layout import BatchLayout, choose_layout
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]
BY_SIZE, MIXED = "ours by size", "ours mixed"
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


def measure(study: Study) -> None:
    """Measure steps, then streams."""
    study.found["what"] = (
        "one step of the same rows over diffusers' float32 UNet row by row, and a stream over the "
        "float32 pipeline one by one; CPU time of one thread, in turns"
    )
    subject = load_subject()
    contests = {dtype: _contest(subject, dtype) for dtype in DTYPES}
    right = []
    with study.part(0.0, 0.7), torch.inference_mode():
        for dtype, scale, batch in study.each(product(DTYPES, SCALES, BATCHES)):
            rows = study.compare("steps", _steps(contests[dtype], batch, scale, study.pick(15, 2)))
            gain = ratio(rows, BY_SIZE, MIXED)
            choice = choose_layout(len(set(BATCHES[batch])), contests[dtype].cost)
            is_tie = abs(gain["median"] - 1) <= _TIE
            right.append(is_tie or (gain["median"] > 1) == (choice == "mixed"))
            rows[MIXED] |= {"over_by_size": gain, "layout": choice, "layout_is_faster": right[-1]}
            _aims(study, rows[MIXED], gain, contests[dtype].computes)
    with study.part(0.7, 1.0):
        for dtype in study.each(DTYPES):
            case = _stream(contests[dtype], study.pick(18, 4), study.pick(5, 1))
            rows = study.compare("streams of 64, 96, 128 px and 15, 20, 25 steps", case)
            if "speed_up" in rows["engine"]:
                least = _STREAM_AIMS[contests[dtype].computes]
                name = f"stream of sizes and steps, {dtype}"
                study.at_least(name, least, rows["engine"]["speed_up"], "x")
    share = 100 * sum(right) / len(right)
    study.at_least("faster layout chosen, of the cells", 90, share, "%")


def _contest(subject: Subject, dtype: str) -> Contest:
    unet = copy.deepcopy(subject.pipeline.unet).to(DTYPES[dtype])
    scale, device = subject.pipeline.vae_scale_factor, torch.device("cpu")
    executor = UNetExecutor(copy.deepcopy(unet), vae_scale_factor=scale, device=device)
    model = replace(subject.model, executor=executor)
    cost = measure_step_cost(model, max_batch=8, clock=time.thread_time)
    computes = str(executor.dtype).removeprefix("torch.")
    return Contest(dtype, computes, replace(subject, model=model), unet, cost)


def _steps(contest: Contest, batch: str, scale: float, rounds: int) -> Case:
    """One step of the rows in every way."""
    states = _states(contest, batch, scale)
    by_size: dict[SizePx, list[RequestState]] = defaultdict(list)
    for state in states:
        by_size[state.request.size_px].append(state)
    unet, dtype = contest.subject.pipeline.unet, DTYPES[contest.dtype]
    alone = [_bare(contest, unet, torch.float32, [state]) for state in states]
    static = [_bare(contest, contest.unet, dtype, alike) for alike in by_size.values()]
    ways: dict[str, Callable[[], object]] = {
        BASELINE: lambda: [call() for call in alone],
        "static": lambda: [call() for call in static],
        BY_SIZE: _engine_step(contest, batch, scale, "grouped"),
        MIXED: _engine_step(contest, batch, scale, "mixed"),
    }
    return Case({"rows_px": batch, "dtype": contest.dtype, "guidance": scale > 1}, ways, rounds)


def _aims(study: Study, row: Row, gain: Figure, computes: str) -> None:
    guided = f"guidance {'on' if row['guidance'] else 'off'}"
    name = f"one step, {row['rows_px']} px, {row['dtype']}, {guided}"
    if row["rows_px"].startswith(("8", "12")):
        study.at_least(name, _STEP_AIMS[computes][row["guidance"]], row["speed_up"], "x")
    if row["rows_px"].startswith("4") and not row["guidance"]:
        study.at_least(f"{name}, over by size", 1.25, gain, "x")


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


def _stream(contest: Contest, count: int, rounds: int) -> Case:
    rng, subject = random.Random(11), contest.subject
    steps = [rng.choice(_STREAM_STEPS) for _ in range(count)]
    sides = [rng.choice((64, 96, 128)) for _ in range(count)]
    plain = make_requests(count, px=64, num_steps=steps, guidance_scale=1.0)
    requests = _resized(plain, [(side, side) for side in sides])
    ways = {
        BASELINE: lambda: by_pipeline(subject.pipeline, requests, 1),
        "engine": lambda: by_engine(subject, requests, _STREAM_IN_FLIGHT),
    }
    inexact = () if contest.dtype == "float32" else ("engine",)
    about, shares = {"dtype": contest.dtype}, dict.fromkeys(ways, count)
    return Case(about, ways, rounds, shares, inexact=inexact)


def _resized(requests: Sequence[ImageRequest], sizes: Sequence[SizePx]) -> list[ImageRequest]:
    return [
        replace(request, width_px=width, height_px=height)
        for request, (width, height) in zip(requests, sizes, strict=True)
    ]
