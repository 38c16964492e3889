"""What is run: variants of reuse and numbers of steps, in batches of prompts, one run each."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ray_cluster.policies.reuse import ReuseSchedule

BATCH = 8
MODELS = ("shapes-sd", "shapes-sd3")
Half = Literal["tuning", "held-out"]

EXACT = "exact"
# ReuseSchedule.num_outer (of a UNet skip connections, of a transformer blocks) and interval
_CUTS = {
    "shapes-sd": ((2, 2), (2, 3), (2, 5), (4, 2), (4, 3)),
    "shapes-sd3": ((0, 2), (0, 3), (1, 2), (1, 3), (1, 5)),
}
# the same with a share of the patches computed within
_PATCHES = {
    "shapes-sd": ((2, 0.5, 2), (2, 0.5, 3), (2, 0.25, 3), (4, 0.5, 2), (4, 0.25, 3)),
    "shapes-sd3": ((0, 0.5, 2), (0, 0.5, 3), (1, 0.5, 2), (0, 0.25, 3)),
}
# with a threshold: where it cuts, how far estimates may drift, most steps between two full ones
_DRIFTING = {"shapes-sd": (2, 0.2, 10), "shapes-sd3": (1, 0.2, 10)}


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured.

    Attributes:
        base_steps: numbers of steps that variants are compared at.
        control_steps: numbers of steps that are run exactly to choose by, the bases among them.
        sizes_px: of square images; the first is the one that most images are made of.
        num_tuning: batches of prompts to choose by, at the first size.
        num_held_out: batches to report on, at the first size.
        num_elsewhere: batches of either kind at each of the other sizes.
        models: bundled ones.
    """

    base_steps: tuple[int, ...] = (10, 20, 30, 50)
    control_steps: tuple[int, ...] = (3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 35, 50)
    sizes_px: tuple[int, ...] = (64, 128, 96)
    num_tuning: int = 4
    num_held_out: int = 38
    num_elsewhere: int = 1
    models: tuple[str, ...] = MODELS

    def num_batches(self, px: int, half: Half) -> int:
        """Return how many batches of a half are made at a size."""
        if px != self.sizes_px[0]:
            return self.num_elsewhere
        return self.num_tuning if half == "tuning" else self.num_held_out


def quick_grid() -> Grid:
    """Return what shows in a minute that all works, and is worth nothing as a measurement."""
    return Grid(
        base_steps=(6,), control_steps=(2, 3, 6), sizes_px=(64,), num_tuning=1, num_held_out=1
    )


@dataclass(frozen=True, slots=True)
class FidelityRun:
    """One batch of prompts, made in one way.

    Attributes:
        batch: index of the prompts; even ones are for choosing, odd ones for reporting.
        num_steps: denoising steps.
        variant: ``exact``, or the name of a schedule of reuse.
        guidance: guidance scale; None takes the model's own.
    """

    model: str
    px: int
    batch: int
    num_steps: int
    variant: str = EXACT
    guidance: float | None = None

    @property
    def name(self) -> str:
        """Name of its file."""
        parts = (self.model, self.px, f"b{self.batch:02}", f"n{self.num_steps:02}", self.variant)
        guided = () if self.guidance is None else (f"g{self.guidance:g}",)
        return "_".join(map(str, (*parts, *guided)))

    @property
    def work(self) -> int:
        """How much there is to compute, beside other runs."""
        return self.num_steps * self.px**2

    @property
    def half(self) -> Half:
        """Whether a variant may be chosen by it."""
        return "held-out" if self.batch % 2 else "tuning"

    @property
    def is_exact(self) -> bool:
        """Whether nothing is reused."""
        return self.variant == EXACT

    @property
    def schedule(self) -> ReuseSchedule | None:
        """What is reused."""
        return None if self.is_exact else schedules(self.model)[self.variant]


def schedules(model: str) -> dict[str, ReuseSchedule]:
    """Return the variants of a model by name: cuts by intervals, shares of patches, thresholds.

    What costs alike beside as many rows that reuse has the same name up to the first hyphen.
    """
    found = {
        f"outer{outer}-every{interval}": ReuseSchedule(outer, interval)
        for outer, interval in _CUTS[model]
    }
    found |= {
        f"outer{outer}+patches{share}-every{interval}": ReuseSchedule(
            outer, interval, active_share=share
        )
        for outer, share, interval in _PATCHES[model]
    }
    outer, drift, longest = _DRIFTING[model]
    found[f"outer{outer}-drift{drift}"] = ReuseSchedule(outer, longest, max_drift=drift)
    return found


Finalists = Mapping[tuple[str, int], Collection[tuple[int, str]]]
"""By model and size the numbers of steps and variants (or ``exact``) that are reported."""


def tuning_runs(grid: Grid) -> Iterator[FidelityRun]:
    """Return what variants are chosen by: all of them on even batches of prompts."""
    every = [(steps, EXACT) for steps in grid.control_steps]
    for model, px, batch in _cells(grid, "tuning"):
        variants = [(steps, name) for steps in grid.base_steps for name in schedules(model)]
        yield from _cell(model, px, batch, every + variants)


def held_out_runs(grid: Grid, finalists: Finalists) -> Iterator[FidelityRun]:
    """Return what is reported: odd batches of prompts, of which nothing was chosen."""
    for model, px, batch in _cells(grid, "held-out"):
        yield from _cell(model, px, batch, finalists.get((model, px), ()))


def _cells(grid: Grid, half: Half) -> Iterator[tuple[str, int, int]]:
    """Batches first: whenever it is stopped, all models and sizes have about as many."""
    for index in range(max(grid.num_batches(px, half) for px in grid.sizes_px)):
        for px in grid.sizes_px:
            if index < grid.num_batches(px, half):
                yield from ((model, px, 2 * index + (half == "held-out")) for model in grid.models)


def _cell(
    model: str, px: int, batch: int, wanted: Collection[tuple[int, str]]
) -> list[FidelityRun]:
    """Runs in a random order, so that what else the machine does hits all variants alike."""
    found = [FidelityRun(model, px, batch, *one) for one in sorted(wanted)]
    random.Random(f"{model} {px} {batch}").shuffle(found)
    return found
