"""Steps and streams of several image sizes: diffusers, ours by size, and ours in one batch.

One step of the same rows is taken in four ways, in turns: (a) diffusers' UNet row by row, (b) its
UNet once per size, (c) our executor once per size, (d) our executor once. And a whole stream of
requests of different sizes and steps, prompts to pixels, by the pipeline one by one and the engine.
"""

from __future__ import annotations

import copy
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.engine.contenders import EngineContender, PipelineContender
from benchmarks.engine.speed import TOLERANCE
from benchmarks.engine.subject import Subject, bare_inputs, largest_difference, make_requests
from benchmarks.settings import Report, Settings
from benchmarks.stats import paired_ratio
from benchmarks.stopwatch import Cost, Stopwatch
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.state import RequestState
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.engine.warmup import measure_step_cost
from ray_cluster.policies.batch_layout import BatchLayout, choose_layout
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]
# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 500
_STREAM_STEPS = (15, 20, 25)
# a prediction of the layout counts as right where the layouts are nearer to each other
_TIE = 0.03
BATCHES: dict[str, tuple[SizePx, ...]] = {
    "2: 64, 128": ((64, 64), (128, 128)),
    "4: 64, 64x128, 96, 128": ((64, 64), (64, 128), (96, 96), (128, 128)),
    "8: 64, 96, 128": ((64, 64),) * 3 + ((96, 96),) * 3 + ((128, 128),) * 2,
    "12: 64, 96, 128": ((64, 64),) * 4 + ((96, 96),) * 4 + ((128, 128),) * 4,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Kind:
    """One cell of the table."""

    batch: str
    dtype: str
    guidance_scale: float


class MixedSizes:
    """Measures all cells, each way in turns with the others.

    Args:
        subject: the weights, in float32.
    """

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject = subject
        self._settings = settings
        self._unets = {
            name: copy.deepcopy(subject.pipeline.unet).to(dtype) for name, dtype in DTYPES.items()
        }
        self._models = {
            name: replace(
                subject.model,
                executor=UNetExecutor(
                    copy.deepcopy(unet),
                    vae_scale_factor=subject.pipeline.vae_scale_factor,
                    device=torch.device("cpu"),
                ),
            )
            for name, unet in self._unets.items()
        }
        self._costs: dict[str, StepCost] = {}

    def run(self, report: Report) -> dict[str, Any]:
        """Measure steps, then streams."""
        # as a replica measures it when it starts
        self._costs = {
            name: measure_step_cost(model, max_batch=8, clock=time.thread_time)
            for name, model in self._models.items()
        }
        kinds = [
            Kind(batch, dtype, scale)
            for dtype in DTYPES
            for scale in self._settings.guidance_scales
            for batch in BATCHES
        ]
        cells = []
        for index, kind in enumerate(kinds):
            report(0.7 * index / len(kinds), f"{kind.batch}, {kind.dtype}")
            cells.append(self._cell(kind))
        streams = []
        for index, dtype in enumerate(DTYPES):
            report(0.7 + 0.3 * index / len(DTYPES), f"stream, {dtype}")
            streams.append(self._stream(dtype))
        return {
            "what": "one step of the same rows, CPU time of one thread, in turns; ratios to "
            "diffusers' float32 UNet row by row, pair by pair",
            "cells": cells,
            "streams": streams,
        }

    @torch.inference_mode()
    def _cell(self, kind: Kind) -> dict[str, Any]:
        ways = self._ways(kind)
        for way in ways.values():
            way()
        costs: dict[str, list[float]] = defaultdict(list)
        for turn in range(self._settings.size_turns):
            # the order turns round, so that a slow drift of the machine favours nobody
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                with Stopwatch() as watch:
                    ways[name]()
                costs[name].append(watch.cost.cpu_s)
        ratio = paired_ratio(costs["grouped"], costs["mixed"])
        choice = choose_layout(len(set(BATCHES[kind.batch])), self._costs[kind.dtype])
        is_right = (ratio.median > 1) == (choice == "mixed") or abs(ratio.median - 1) <= _TIE
        return {
            "batch": kind.batch,
            "dtype": kind.dtype,
            "guidance": kind.guidance_scale > 1,
            "ms": {name: 1e3 * min(samples) for name, samples in costs.items()},
            "over_one_by_one": {
                name: paired_ratio(costs["one by one"], samples).as_dict()
                for name, samples in costs.items()
            },
            "mixed_over_grouped": ratio.as_dict(),
            "layout": choice,
            "layout_is_faster": is_right,
        }

    def _ways(self, kind: Kind) -> dict[str, Callable[[], object]]:
        states = self._states(kind)
        row_by_row = [self._bare("float32", [state]) for state in states]
        by_size: dict[SizePx, list[RequestState]] = defaultdict(list)
        for state in states:
            by_size[state.request.size_px].append(state)
        per_size = [self._bare(kind.dtype, alike) for alike in by_size.values()]
        return {
            "one by one": lambda: [call() for call in row_by_row],
            "static": lambda: [call() for call in per_size],
            "grouped": self._steps(kind, "grouped"),
            "mixed": self._steps(kind, "mixed"),
        }

    def _states(self, kind: Kind) -> list[RequestState]:
        sizes = BATCHES[kind.batch]
        requests = [
            replace(request, width_px=size[0], height_px=size[1])
            for request, size in zip(
                make_requests(
                    len(sizes), px=64, num_steps=_NUM_STEPS, guidance_scale=kind.guidance_scale
                ),
                sizes,
                strict=True,
            )
        ]
        return self._subject.start(requests)

    def _bare(self, dtype: str, states: Sequence[RequestState]) -> Callable[[], object]:
        """A call of diffusers' UNet for requests of one size, guidance rows included."""
        unet, wanted = self._unets[dtype], DTYPES[dtype]
        inputs = {
            name: tensor if name == "timestep" else tensor.to(wanted)
            for name, tensor in bare_inputs(self._subject, states).items()
        }
        return lambda: unet(**inputs, return_dict=False)

    def _steps(self, kind: Kind, layout: BatchLayout) -> Callable[[], object]:
        """Whole engine steps: policy, model and the samplers' update."""
        engine = build_engine(
            self._models[kind.dtype],
            max_batch=len(BATCHES[kind.batch]),
            clock=time.thread_time,
            layout=lambda _num_sizes: layout,
        )
        for state in self._states(kind):
            engine.add(state)
        return engine.step

    def _stream(self, dtype: str) -> dict[str, Any]:
        """A whole stream with its drain; the baseline in float32, as diffusers is faster there."""
        subject = replace(self._subject, model=self._models[dtype])
        pipeline, engine = PipelineContender(subject.pipeline), EngineContender(subject)
        requests = _stream_requests(self._settings.stream_requests)
        costs: dict[str, list[Cost]] = defaultdict(list)
        differences = []
        for turn in range(self._settings.stream_turns):
            ways = [("one by one", pipeline, 1), ("engine", engine, 8)]
            images = {}
            for name, contender, in_flight in ways[:: 1 if turn % 2 == 0 else -1]:
                with Stopwatch() as watch:
                    images[name] = contender.serve(requests, in_flight).images
                costs[name].append(watch.cost.per(len(requests)))
            differences.append(largest_difference(images["one by one"], images["engine"]))
        ratio = paired_ratio(
            [cost.cpu_s for cost in costs["one by one"]], [cost.cpu_s for cost in costs["engine"]]
        )
        return {
            "dtype": dtype,
            "requests": len(requests),
            "over_one_by_one": ratio.as_dict(),
            "max_difference_255": max(differences),
            "images_equal": max(differences) <= TOLERANCE,
        }


def _stream_requests(count: int) -> list[ImageRequest]:
    rng = random.Random(11)
    steps = [rng.choice(_STREAM_STEPS) for _ in range(count)]
    return [
        replace(request, width_px=side, height_px=side)
        for request, side in zip(
            make_requests(count, px=64, num_steps=steps, guidance_scale=1.0),
            [rng.choice((64, 96, 128)) for _ in range(count)],
            strict=True,
        )
    ]
