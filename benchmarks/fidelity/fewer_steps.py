"""How few steps will do: chosen by the worst image of one half, and held to the other half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fidelity.fewer_plan import (
    BARS,
    SHARE_OF_LOSS,
    Check,
    Chosen,
    Mode,
    ModelGrid,
    check_batches,
    held_out_batches,
    tuning_runs,
)
from benchmarks.fidelity.frontier import Frontier
from benchmarks.fidelity.plan import FidelityRun
from benchmarks.fidelity.work import Made


@dataclass(frozen=True, slots=True)
class FewerStepsOutcome:
    """A mode at a number of steps asked for, on held-out prompts.

    Attributes:
        asked: steps of the exact images.
        steps: of the mode's images.
        check: size and guidance scale.
        tuning_worst: least SSIM of the images that the steps were chosen by; None for a check.
        right: share of images that show all that the prompt says, as the classifier reads them.
        exact_right: likewise, of the exact images.
        cpu_share: of the thread's time that the exact images take, from prompts to pixels.
        wall_share: likewise, of wall time.
    """

    model: str
    mode: Mode
    asked: int
    steps: int
    check: Check
    num_images: int
    mean: float
    worst: float
    tuning_worst: float | None
    right: float
    exact_right: float
    cpu_share: float
    wall_share: float

    @property
    def is_kept(self) -> bool:
        """Whether the worst image is as good as the mode promises."""
        return self.worst >= BARS[self.mode]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class Study:
    """All runs of one model that are there."""

    def __init__(self, grid: ModelGrid, made: Mapping[FidelityRun, Made]) -> None:
        self.grid = grid
        self._made = made
        self._frontier = Frontier(made)

    def tuning_worst(self, base: int) -> dict[int, float]:
        """Return the least SSIM to the images of ``base`` steps by the steps that were tried."""
        found: dict[int, float] = {}
        for run in tuning_runs(self.grid):
            exact = replace(run, num_steps=base)
            is_tried = run.num_steps in self.grid.tried_steps and run.num_steps < base
            if not is_tried or run not in self._made or exact not in self._made:
                continue
            worst = float(self._frontier.ssim(run, exact).min())
            found[run.num_steps] = min(worst, found.get(run.num_steps, 1.0))
        return dict(sorted(found.items()))

    def chosen(self) -> Chosen:
        """Return the steps of each mode: the fewest that lose little enough, by the tuning half.

        More steps asked for never give fewer. A base that no number of steps will do for is left
        out, as is one of which there are no runs.
        """
        found: dict[int, dict[Mode, int]] = {}
        least: dict[Mode, int] = dict.fromkeys(BARS, 0)
        for base in sorted(self.grid.base_steps):
            worst = self.tuning_worst(base)
            steps = {mode: _fewest(worst, bar) for mode, bar in BARS.items()}
            if all(count is None for count in steps.values()):
                continue
            for mode, count in steps.items():
                # what nothing else will do for is made with all steps
                least[mode] = max(least[mode], base if count is None else count)
            found[base] = dict(least)
        return found

    def outcomes(self) -> list[FewerStepsOutcome]:
        """Return how the chosen steps do on the other half, checks last."""
        chosen, main = self.chosen(), Check(64)
        found = [
            self._outcome(mode, base, steps, main, held_out_batches(self.grid, base))
            for base, modes in chosen.items()
            for mode, steps in modes.items()
        ]
        found += [
            self._outcome(mode, self.grid.main_base, steps, check, check_batches(self.grid))
            for check in self.grid.checks
            for mode, steps in chosen.get(self.grid.main_base, {}).items()
        ]
        return [one for one in found if one is not None]

    def _outcome(
        self, mode: Mode, asked: int, steps: int, check: Check, batches: Sequence[int]
    ) -> FewerStepsOutcome | None:
        own = [
            FidelityRun(self.grid.model, check.px, one, steps, guidance=check.guidance)
            for one in batches
        ]
        exact = [replace(run, num_steps=asked) for run in own]
        pairs = [
            pair for pair in zip(own, exact, strict=True) if all(one in self._made for one in pair)
        ]
        if not pairs:
            return None
        own, exact = [one for one, _ in pairs], [other for _, other in pairs]
        similar = np.concatenate([self._frontier.ssim(*pair) for pair in pairs])
        tuning = self.tuning_worst(asked).get(steps) if check == Check(64) else None
        return FewerStepsOutcome(
            model=self.grid.model,
            mode=mode,
            asked=asked,
            steps=steps,
            check=check,
            num_images=len(similar),
            mean=float(similar.mean()),
            worst=float(similar.min()),
            tuning_worst=tuning,
            right=self._right(own),
            exact_right=self._right(exact),
            cpu_share=self._median(own, "whole_cpu_s") / self._median(exact, "whole_cpu_s"),
            wall_share=self._median(own, "whole_wall_s") / self._median(exact, "whole_wall_s"),
        )

    def _right(self, runs: Iterable[FidelityRun]) -> float:
        return float(np.concatenate([self._frontier.right(run) for run in runs]).mean())

    def _median(self, runs: Iterable[FidelityRun], clock: str) -> float:
        return float(np.median([getattr(self._made[run], clock) for run in runs]))


def _fewest(worst_by_steps: Mapping[int, float], bar: float) -> int | None:
    """Return the fewest steps that, with all that are more, keep to a bar with a margin."""
    wanted = 1 - SHARE_OF_LOSS * (1 - bar)
    enough = None
    for steps, worst in sorted(worst_by_steps.items(), reverse=True):
        if worst < wanted:
            break
        enough = steps
    return enough
