"""What keeps a model's images near enough to those with all steps, at the least cost.

Fewer steps and reuse schedules are chosen by the worst image of one half of the prompts, and held
to the bar by the other half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ray_cluster.policies.fidelity import LEAST_SSIM
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.quality.distances import similarity

Mode = Literal["balanced", "fast"]
Half = Literal["choosing", "reporting"]
SizePx = tuple[int, int]
MODES: tuple[Mode, ...] = ("balanced", "fast")
# the worst of many images is worse than that of few: when choosing, only so much of what a mode may
# lose is given away
_SHARE_OF_LOSS = 2 / 3
# where calls may ask for up to 50 steps
_TRIED_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40)
_INTERVALS = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts at a size, made in one way; even batches are those to choose by."""

    batch: int
    size_px: SizePx
    num_steps: int
    schedule: ReuseSchedule | None = None

    @property
    def name(self) -> str:
        """Name of its file."""
        width, height = self.size_px
        how = "exact" if self.schedule is None else str(self.schedule)
        return f"b{self.batch:02}-{width}x{height}-n{self.num_steps:02}-{how}"

    @property
    def half(self) -> Half:
        """What it is for."""
        return "reporting" if self.batch % 2 else "choosing"


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a run.

    Attributes:
        images: ``[B, H, W, 3]`` uint8.
        step_s: seconds of every step.
        is_reused: per step, whether activations were reused.
    """

    images: npt.NDArray[np.uint8]
    step_s: tuple[float, ...]
    is_reused: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is made.

    Attributes:
        asked: numbers of steps that calls may ask for, rising.
        tried: fewer steps.
        schedules: tried at each number of steps asked for.
        num_batches: of each half.
    """

    sizes_px: tuple[SizePx, ...]
    asked: tuple[int, ...]
    tried: tuple[int, ...]
    schedules: tuple[ReuseSchedule, ...]
    num_batches: int

    @classmethod
    def of(
        cls,
        sizes_px: Sequence[SizePx],
        asked: Sequence[int],
        outer_blocks: range,
        num_batches: int,
        *,
        is_quick: bool = False,
    ) -> Plan:
        """Return the usual plan; a quick one shows that all works, and tries little."""
        steps = tuple(sorted(set(asked)))
        tried = tuple(one for one in _TRIED_STEPS if one < steps[-1])
        third = max(1, len(outer_blocks) // 3)
        outer = outer_blocks[: 2 * third + 1 : third]
        schedules = tuple(ReuseSchedule(num, interval) for num in outer for interval in _INTERVALS)
        if is_quick:
            tried, schedules = tried[1::2][:2], schedules[:1]
        return cls(tuple(sizes_px), steps, tried, schedules, num_batches)

    def choosing(self) -> Iterator[Run]:
        """Return the runs to choose by."""
        for batch, size in self._batches("choosing"):
            for steps in sorted({*self.asked, *self.tried}):
                yield Run(batch, size, steps)
            for steps in self.asked:
                for schedule in self.schedules:
                    if schedule.interval <= steps:
                        yield Run(batch, size, steps, schedule)

    def reporting(self, choices: Sequence[Choice]) -> Iterator[Run]:
        """Return the other half's runs, of what was chosen and of all steps."""
        for batch, size in self._batches("reporting"):
            runs = {Run(batch, size, choice.asked) for choice in choices}
            runs |= {replace(one.run, batch=batch, size_px=size) for one in _options(choices)}
            yield from sorted(runs, key=lambda run: run.name)

    def _batches(self, half: Half) -> Iterator[tuple[int, SizePx]]:
        for index in range(self.num_batches):
            for size in self.sizes_px:
                yield 2 * index + (half == "reporting"), size


@dataclass(frozen=True, slots=True)
class Option:
    """A way to make images instead of with all steps.

    Attributes:
        run: its steps and schedule, of any batch.
        cost: in whole steps.
        worst: least SSIM to the images with all steps.
        mean: likewise.
    """

    run: Run
    cost: float
    worst: float
    mean: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What a mode is made with where so many steps are asked for.

    Attributes:
        fewer: the fewest steps without reuse; None if all are needed.
        reused: a schedule that is cheaper than these; None if there is none.
    """

    asked: int
    mode: Mode
    fewer: Option | None
    reused: Option | None


def _options(choices: Sequence[Choice]) -> list[Option]:
    found = [option for choice in choices for option in (choice.fewer, choice.reused)]
    return [option for option in found if option is not None]


class Study:
    """All runs that are there."""

    def __init__(self, plan: Plan, made: Mapping[Run, Made]) -> None:
        self.plan = plan
        self.made = made
        self._similar: dict[tuple[Run, int], npt.NDArray[np.float64]] = {}

    def options(self, asked: int, half: Half = "choosing") -> list[Option]:
        """Return all ways that were tried where so many steps are asked for, cheapest first."""
        found: dict[Run, list[npt.NDArray[np.float64]]] = {}
        for run in self.made:
            is_exact = run.schedule is None and run.num_steps == asked
            if run.half != half or run.num_steps > asked or is_exact:
                continue
            if replace(run, num_steps=asked, schedule=None) in self.made:
                key = Run(0, self.plan.sizes_px[0], run.num_steps, run.schedule)
                found.setdefault(key, []).append(self._similarity(run, asked))
        options = [
            Option(run, self.cost(run), float(ssim.min()), float(ssim.mean()))
            for run, ssim in ((run, np.concatenate(parts)) for run, parts in found.items())
        ]
        return sorted(options, key=lambda one: (one.cost, one.run.name))

    def cost(self, run: Run) -> float:
        """Return what a run costs in whole steps."""
        if run.schedule is None:
            return float(run.num_steps)
        num_full = run.schedule.num_full(run.num_steps)
        return num_full + self.reused_cost[run.schedule.num_outer] * (run.num_steps - num_full)

    @cached_property
    def reused_cost(self) -> dict[int, float]:
        """What a step that reuses costs in whole steps, by its number of outer blocks."""
        samples: dict[tuple[SizePx, int | None], list[float]] = {}
        for run, made in self.made.items():
            for seconds, is_reused in zip(made.step_s, made.is_reused, strict=True):
                outer = run.schedule.num_outer if is_reused and run.schedule else None
                samples.setdefault((run.size_px, outer), []).append(seconds)
        median = {key: float(np.median(found)) for key, found in samples.items()}
        shares: dict[int, list[float]] = {}
        for (size, outer), seconds in median.items():
            if outer is not None:
                shares.setdefault(outer, []).append(min(1.0, seconds / median[size, None]))
        # of several sizes that where reuse saves least
        return {outer: max(found) for outer, found in shares.items()}

    def choices(self) -> list[Choice]:
        """Return what each mode is made with, by the half to choose by.

        More steps asked for never give fewer.
        """
        found = []
        least: dict[Mode, int] = dict.fromkeys(MODES, 0)
        for asked in self.plan.asked:
            options = self.options(asked)
            plain = [one for one in options if one.run.schedule is None]
            for mode in MODES:
                wanted = 1 - _SHARE_OF_LOSS * (1 - LEAST_SSIM[mode])
                fewer = _fewest(plain, wanted)
                least[mode] = max(least[mode], asked if fewer is None else fewer.run.num_steps)
                fewer = next((one for one in plain if one.run.num_steps == least[mode]), None)
                limit = asked if fewer is None else fewer.cost
                reused = [one for one in options if one.run.schedule and one.worst >= wanted]
                cheapest = reused[0] if reused and reused[0].cost < limit else None
                found.append(Choice(asked, mode, fewer, cheapest))
        return found

    def outcome(self, choice: Choice, option: Option) -> Option | None:
        """Return how an option did in the other half; None before that is made."""
        others = self.options(choice.asked, "reporting")
        key = (option.run.num_steps, option.run.schedule)
        return next((one for one in others if (one.run.num_steps, one.run.schedule) == key), None)

    def table(self, *, sampler: str, max_guidance_scale: float) -> dict[str, Any] | None:
        """Return the pool's fidelity table; None if nothing saves anything.

        What the other half breaks a bar with is left out. The SSIM is that of the worst image of
        both halves.
        """
        rows: dict[int, dict[str, Any]] = {asked: {"asked": asked} for asked in self.plan.asked}
        least: dict[Mode, int] = dict.fromkeys(MODES, 0)
        for choice in self.choices():
            mode, asked = choice.mode, choice.asked
            fewer, ssim = asked, 1.0
            if (worst := self._kept(choice, choice.fewer)) is not None and choice.fewer:
                fewer, ssim = choice.fewer.run.num_steps, worst
            if fewer < least[mode]:
                fewer, ssim = asked, 1.0
            if mode == "fast" and fewer > rows[asked]["balanced"]:
                # what is balanced is fast too
                fewer, ssim = rows[asked]["balanced"], rows[asked]["balanced_ssim"]
            least[mode] = fewer
            rows[asked] |= {mode: fewer, f"{mode}_ssim": _rounded_down(ssim)}
            if (worst := self._kept(choice, choice.reused)) is not None and choice.reused:
                run = choice.reused.run
                rows[asked][f"{mode}_reuse"] = {
                    "steps": run.num_steps,
                    "reuse": str(run.schedule),
                    "cost": math.ceil(1000 * choice.reused.cost / run.num_steps) / 1000,
                    "ssim": _rounded_down(worst),
                }
        is_saving = [
            row[mode] < row["asked"] or f"{mode}_reuse" in row
            for row in rows.values()
            for mode in MODES
        ]
        if not any(is_saving):
            return None
        return {
            "sampler": sampler,
            "max_guidance_scale": max_guidance_scale,
            "steps": list(rows.values()),
        }

    def _kept(self, choice: Choice, option: Option | None) -> float | None:
        """Return the worst image of both halves, if the other half keeps the bar."""
        outcome = None if option is None else self.outcome(choice, option)
        if option is None or outcome is None or outcome.worst < LEAST_SSIM[choice.mode]:
            return None
        return min(option.worst, outcome.worst)

    def _similarity(self, run: Run, asked: int) -> npt.NDArray[np.float64]:
        if (run, asked) not in self._similar:
            exact = replace(run, num_steps=asked, schedule=None)
            pair = (as_pictures(self.made[one].images) for one in (run, exact))
            self._similar[run, asked] = similarity(*pair).double().numpy()
        return self._similar[run, asked]


def as_pictures(images: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return images ``[B, H, W, 3]`` as pictures ``[B, 3, H, W]`` in 0..1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def _rounded_down(ssim: float) -> float:
    return math.floor(1000 * ssim) / 1000


def _fewest(options: Sequence[Option], wanted: float) -> Option | None:
    """Return the fewest steps that, with all that are more, have no image below a similarity."""
    enough = None
    for option in sorted(options, key=lambda one: -one.run.num_steps):
        if option.worst < wanted:
            break
        enough = option
    return enough
