"""What the runs say: cost and quality of every variant, beside fewer steps at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.fidelity.plan import FidelityRun, Half
from benchmarks.fidelity.work import Made, prompts_of
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.quality.distances import similarity
from ray_cluster.training.scoring import Drawn

Values = npt.NDArray[np.float64]
Clock = Literal["cpu_s", "wall_s"]

_RESAMPLES = 10_000
_SEED = 20261122


@dataclass(frozen=True, slots=True)
class Quality:
    """The images of a variant in one half of the prompts, beside those of fewer steps.

    Attributes:
        num_images: of the half.
        mean: mean SSIM to the exact images of the same number of steps.
        worst: the least.
        right: share of images that show all that the prompt says, as the classifier reads them.
        control_mean: of the images with fewer steps at the same time, likewise.
        control_worst: likewise.
        control_right: likewise.
        gain: mean over images of the SSIM less that of the control.
        gain_low: lower end of its paired bootstrap interval, of 95 % for all variants of the model
            together (Bonferroni).
        gain_high: upper end.
    """

    num_images: int
    mean: float
    worst: float
    right: float
    control_mean: float
    control_worst: float
    control_right: float
    gain: float
    gain_low: float
    gain_high: float


@dataclass(frozen=True, slots=True)
class Point:
    """A variant at a number of steps and a size.

    Attributes:
        cost_steps: what it costs, in exact steps of the same batch size, by CPU time.
        wall_steps: likewise by wall time.
        share_reused: of the rows' steps.
        quality: by half.
    """

    model: str
    px: int
    base_steps: int
    variant: str
    cost_steps: float
    wall_steps: float
    share_reused: float
    quality: Mapping[Half, Quality]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class Frontier:
    """All finished runs.

    Args:
        made: by run.
    """

    def __init__(self, made: Mapping[FidelityRun, Made]) -> None:
        self._made = made
        self._classifier = load_classifier()
        self._right: dict[FidelityRun, Values] = {}
        self._ssim: dict[tuple[FidelityRun, FidelityRun], Values] = {}

    @cached_property
    def step_costs(self) -> dict[tuple[str, int, str, int], dict[Clock, float]]:
        """Median seconds of a step by model, size, variant's cut and number of rows that reuse."""
        samples: dict[tuple[str, int, str, int], list[tuple[float, float]]] = defaultdict(list)
        for run, made in self._made.items():
            for cpu_s, wall_s, count in zip(made.cpu_s, made.wall_s, made.num_reused, strict=True):
                samples[_kind(run, count)].append((cpu_s, wall_s))
        medians = {kind: np.median(found, axis=0) for kind, found in samples.items()}
        return {
            kind: {"cpu_s": float(cpu_s), "wall_s": float(wall_s)}
            for kind, (cpu_s, wall_s) in medians.items()
        }

    def num_steps_alike(self, runs: Sequence[FidelityRun], clock: Clock) -> float:
        """Return how many exact steps take as long as runs of one variant do, in the mean."""
        model, px = runs[0].model, runs[0].px
        full_s = self.step_costs[model, px, "", 0][clock]
        seconds = [
            sum(self.step_costs[_kind(run, count)][clock] for count in self._made[run].num_reused)
            for run in runs
        ]
        return float(np.mean(seconds)) / full_s

    def points(self, num_variants: int) -> list[Point]:
        """Return all variants of which there are runs, with their base and a control.

        Args:
            num_variants: of a model, for the correction of intervals.
        """
        groups: dict[tuple[str, int, int, str], list[FidelityRun]] = defaultdict(list)
        for run in self._made:
            if not run.is_exact and self._exact(run, run.num_steps) in self._made:
                groups[run.model, run.px, run.num_steps, run.variant].append(run)
        return [
            self._point(key, sorted(found, key=_batch), num_variants)
            for key, found in groups.items()
        ]

    def _point(
        self, key: tuple[str, int, int, str], runs: Sequence[FidelityRun], num_variants: int
    ) -> Point:
        halves: dict[Half, list[FidelityRun]] = defaultdict(list)
        for run in runs:
            halves[run.half].append(run)
        cost = self.num_steps_alike(runs, "cpu_s")
        reused = [np.mean(self._made[run].num_reused) / len(self._made[run].images) for run in runs]
        quality = {half: self._quality(some, cost, num_variants) for half, some in halves.items()}
        wall = self.num_steps_alike(runs, "wall_s")
        return Point(*key, cost, wall, float(np.mean(reused)), quality)

    def _quality(self, runs: Sequence[FidelityRun], cost: float, num_variants: int) -> Quality:
        own, right, control, control_right = [], [], [], []
        for run in runs:
            exact = self._exact(run, run.num_steps)
            own.append(self.ssim(run, exact))
            right.append(self.right(run))
            weighted = self._controls(run, cost)
            control.append(sum(weight * self.ssim(one, exact) for one, weight in weighted))
            control_right.append(sum(weight * self.right(one) for one, weight in weighted))
        mine, theirs = np.concatenate(own), np.concatenate(control)
        low, high = mean_interval(mine - theirs, alpha=0.05 / num_variants)
        return Quality(
            num_images=len(mine),
            mean=float(mine.mean()),
            worst=float(mine.min()),
            right=float(np.concatenate(right).mean()),
            control_mean=float(theirs.mean()),
            control_worst=float(theirs.min()),
            control_right=float(np.concatenate(control_right).mean()),
            gain=float((mine - theirs).mean()),
            gain_low=low,
            gain_high=high,
        )

    def _controls(self, run: FidelityRun, cost: float) -> list[tuple[FidelityRun, float]]:
        """Return the exact runs around a cost in steps, weighted so that they cost as much.

        Where even the shortest run costs more, it is the control.
        """
        there = sorted(
            one.num_steps for one in self._made if one == self._exact(run, one.num_steps)
        )
        below = max([steps for steps in there if steps <= cost], default=there[0])
        above = min([steps for steps in there if steps >= cost], default=there[-1])
        weight = 0.0 if above <= below else (cost - below) / (above - below)
        return [
            (self._exact(run, below), 1 - weight),
            (self._exact(run, above), weight),
        ]

    @staticmethod
    def _exact(run: FidelityRun, num_steps: int) -> FidelityRun:
        return FidelityRun(run.model, run.px, run.batch, num_steps)

    def ssim(self, run: FidelityRun, other: FidelityRun) -> Values:
        """Return the structural similarity of a run's images to another's."""
        if (run, other) not in self._ssim:
            pair = (_as_tensor(self._made[one].images) for one in (run, other))
            self._ssim[run, other] = similarity(*pair).double().numpy()
        return self._ssim[run, other]

    def right(self, run: FidelityRun) -> Values:
        """Return per image whether it shows all that its prompt says."""
        if run not in self._right:
            pixels = _as_tensor(self._made[run].images)
            readings = read_pictures(self._classifier, pixels)
            drawn = zip(prompts_of(run.batch), pixels, readings, strict=True)
            marks = [Drawn(prompt.scene, *one).all_right for (prompt, _), *one in drawn]
            self._right[run] = np.array(marks, float)
        return self._right[run]

    def exact_similarity(self, model: str, px: int, base: int, half: Half) -> dict[int, Values]:
        """Return by number of steps how near exact images are to those of a base."""
        found: dict[int, list[Values]] = defaultdict(list)
        for run in sorted(self._made, key=_batch):
            exact = self._exact(run, base)
            is_of_cell = (run.model, run.px, run.half) == (model, px, half) and run.is_exact
            if is_of_cell and exact in self._made and run.num_steps <= base:
                found[run.num_steps].append(self.ssim(run, exact))
        return {steps: np.concatenate(values) for steps, values in sorted(found.items())}


def mean_interval(values: Values, *, alpha: float) -> tuple[float, float]:
    """Return the bootstrap interval of a mean, ``1 - alpha`` wide."""
    draws = np.random.default_rng(_SEED).integers(0, len(values), (_RESAMPLES, len(values)))
    means = values[draws].mean(axis=1)
    low, high = np.percentile(means, [50 * alpha, 100 - 50 * alpha])
    return float(low), float(high)


def _kind(run: FidelityRun, num_reused: int) -> tuple[str, int, str, int]:
    cut = run.variant.partition("-")[0] if num_reused else ""
    return (run.model, run.px, cut, num_reused)


def _batch(run: FidelityRun) -> int:
    return run.batch


def _as_tensor(images: Iterable[Any]) -> torch.Tensor:
    pixels = torch.from_numpy(np.asarray(images)).permute(0, 3, 1, 2)
    return pixels.float() / 255
