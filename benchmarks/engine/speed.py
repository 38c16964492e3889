"""Engine, static batches and bare model calls against the pipeline one by one.

Every block of work stands between two blocks of the one-by-one pipeline, and is compared with
their mean: what other processes do to the machine meanwhile hits both sides alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engine.contenders import EngineContender, PipelineContender, Served
from benchmarks.engine.subject import Subject, bare_inputs, largest_difference, make_requests
from benchmarks.settings import Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import Cost, Stopwatch
from ray_cluster.engine.image_decoder import Pixels

# DESIGN: the image within 1/255 per pixel
TOLERANCE = 1
_BARE_CALLS = 4


@dataclass(frozen=True, slots=True)
class SpeedCell:
    """One size with or without guidance."""

    px: int
    guidance_scale: float
    num_steps: int

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return f"{self.px} px, guidance {'on' if self.guidance_scale > 1 else 'off'}"


@dataclass(slots=True)
class Record:
    """What was measured in one cell: costs per image, and how far images are apart.

    Attributes:
        costs: per contender, of every block.
        baselines: per contender, of the one-by-one blocks around each of its blocks.
        differences: per contender, the largest difference to the one-by-one images, in 1/255.
        one_by_one: images of the pipeline alone so far, by request id.
    """

    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    baselines: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    differences: dict[str, int] = field(default_factory=dict)
    one_by_one: dict[str, Pixels] = field(default_factory=dict)
    num_baselines: int = 0


class SpeedBenchmark:
    """Measures all cells in rounds.

    Args:
        subject: the weights.
    """

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject = subject
        self._settings = settings
        self._pipeline = PipelineContender(subject.pipeline)
        self._engine = EngineContender(subject)
        self._cells = [
            SpeedCell(px, guidance_scale, settings.num_steps)
            for px in settings.sizes_px
            for guidance_scale in settings.guidance_scales
        ]
        self._records = {cell: Record() for cell in self._cells}

    def run(self, report: Report) -> dict[str, Any]:
        """Measure and return the section's results."""
        for cell in self._cells:
            report(0.0, f"warm-up {cell.name}")
            self._warm_up(cell)
        limit_s = time.monotonic() + self._settings.engine_s
        for number in range(self._settings.max_rounds):
            if number >= self._settings.min_rounds and time.monotonic() > limit_s:
                break
            visits = self._visits()
            for index, cell in enumerate(visits):
                share = (number + index / len(visits)) / self._settings.min_rounds
                report(min(0.99, share), f"round {number + 1}: {cell.name}")
                self._measure(cell, self._records[cell], reverse=number % 2 == 1)
        return {
            "what": "speed-up over the pipeline one by one, per image, prompts to pixels, "
            "one thread; CPU time of the thread beside wall time",
            "num_steps": self._settings.num_steps,
            "cells": [_cell_result(cell, self._records[cell]) for cell in self._cells],
        }

    def _visits(self) -> list[SpeedCell]:
        """The cells of one round; those that an aim is set for come three times."""
        aims = [cell for cell in self._cells if cell.px == self._settings.aim_px]
        again = aims if self._settings.max_rounds > 1 else []
        half = len(self._cells) // 2
        return [*self._cells[:half], *again, *self._cells[half:], *again]

    def _warm_up(self, cell: SpeedCell) -> None:
        requests = self._requests(cell, max(self._settings.in_flight), num_steps=2)
        for in_flight in self._settings.in_flight:
            self._pipeline.serve(requests[:in_flight], in_flight)
            self._engine.serve(requests[:in_flight], in_flight)

    def _measure(self, cell: SpeedCell, record: Record, *, reverse: bool) -> None:
        order = list(self._settings.in_flight)
        if reverse:
            order.reverse()
        made: dict[str, Served] = {}
        before = self._baseline(cell, record)
        for in_flight in order:
            blocks = list(self._blocks(cell, in_flight, made))
            after = self._baseline(cell, record)
            for name, cost in blocks:
                record.costs[name].append(cost)
                record.baselines[name].append((before + after).per(2))
            before = after
        for name, served in made.items():
            difference = largest_difference(record.one_by_one, served.images)
            record.differences[name] = max(difference, record.differences.get(name, 0))

    def _blocks(
        self, cell: SpeedCell, in_flight: int, made: dict[str, Served]
    ) -> Iterator[tuple[str, Cost]]:
        """Serve requests in each way; yield names and costs per image, put images in ``made``."""
        requests = self._requests(cell, max(2, in_flight))
        contenders = [("engine", self._engine), ("static", self._pipeline)]
        if in_flight == 1:
            # a static batch of one is the baseline itself
            contenders = contenders[:1]
        for kind, contender in contenders:
            name = f"{kind} {in_flight}"
            with Stopwatch() as watch:
                made[name] = contender.serve(requests, in_flight)
            yield name, watch.cost.per(len(requests))
        yield f"bare {in_flight}", self._bare_call(cell, in_flight).per(in_flight)

    def _bare_call(self, cell: SpeedCell, in_flight: int) -> Cost:
        """Return the cost of the model calls of a whole run of a full batch, and nothing else."""
        with torch.inference_mode():
            states = self._subject.start(self._requests(cell, in_flight))
            inputs = bare_inputs(self._subject, states)
            unet = self._subject.pipeline.unet
            unet(**inputs, return_dict=False)
            with Stopwatch() as watch:
                for _ in range(_BARE_CALLS):
                    unet(**inputs, return_dict=False)
        cost = watch.cost.per(_BARE_CALLS)
        steps = cell.num_steps
        return Cost(cost.cpu_s * steps, cost.wall_s * steps, cost.process_s * steps)

    def _baseline(self, cell: SpeedCell, record: Record) -> Cost:
        """Make the next image on its own; return its cost."""
        requests = self._requests(cell, max(self._settings.in_flight))
        request = requests[record.num_baselines % len(requests)]
        record.num_baselines += 1
        with Stopwatch() as watch:
            served = self._pipeline.serve([request], 1)
        record.one_by_one |= served.images
        return watch.cost

    def _requests(self, cell: SpeedCell, count: int, num_steps: int | None = None) -> list[Any]:
        return make_requests(
            count,
            px=cell.px,
            num_steps=num_steps or cell.num_steps,
            guidance_scale=cell.guidance_scale,
        )


def _cell_result(cell: SpeedCell, record: Record) -> dict[str, Any]:
    return {
        "px": cell.px,
        "guidance": cell.guidance_scale > 1,
        "contenders": [
            contender_result(name, costs, record.baselines[name], record.differences.get(name))
            for name, costs in record.costs.items()
        ],
        "images_compared": len(record.one_by_one),
    }


def contender_result(
    name: str, costs: Sequence[Cost], baselines: Sequence[Cost], difference: int | None
) -> dict[str, Any]:
    """Return a contender's figures; no speed-up if its images are not those of the pipeline.

    Args:
        difference: largest difference of a pixel, in 1/255; None for a contender without images.
    """
    kind, _, in_flight = name.partition(" ")
    has_images = kind != "bare"
    exact = not has_images or (difference is not None and difference <= TOLERANCE)
    cpu, wall = [c.cpu_s for c in costs], [c.wall_s for c in costs]
    result: dict[str, Any] = {
        "kind": kind,
        "in_flight": int(in_flight),
        "images_equal": exact,
        "max_difference_255": difference,
        "seconds_per_image_cpu": summarise(cpu).as_dict(),
        "one_by_one_seconds_per_image_cpu": summarise([c.cpu_s for c in baselines]).as_dict(),
        "other_threads_share": max(c.process_s / c.cpu_s for c in costs) - 1,
    }
    if exact:
        result["speed_up_cpu"] = paired_ratio([b.cpu_s for b in baselines], cpu).as_dict()
        result["speed_up_wall"] = paired_ratio([b.wall_s for b in baselines], wall).as_dict()
    return result
