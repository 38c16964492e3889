"""How near an image is to the one with all its steps, and how few steps keep that.

The modes other than exact are fewer denoising steps: reuse across steps was no better at the same
time (docs/engine.md). How few is measured per model and number of steps asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Fidelity = Literal["exact", "balanced", "fast"]
Concession = Literal["fidelity", "steps"]
"""What may be given up to be in time: fidelity down to fast, or steps down to a number."""

# the worst image's structural similarity to the exact one
LEAST_SSIM: Mapping[Fidelity, float] = {"exact": 1.0, "balanced": 0.95, "fast": 0.85}


@dataclass(frozen=True, slots=True)
class FewerSteps:
    """How few steps will do where ``asked`` were asked for.

    Attributes:
        balanced: steps of ``balanced``, from those of ``fast`` to those asked for.
        fast: steps of ``fast``.
        balanced_ssim: worst image measured with so few; the mode's promise where not measured.
        fast_ssim: likewise.
    """

    asked: int
    balanced: int
    fast: int
    balanced_ssim: float = LEAST_SSIM["balanced"]
    fast_ssim: float = LEAST_SSIM["fast"]

    def steps(self, fidelity: Fidelity) -> int:
        return {"exact": self.asked, "balanced": self.balanced, "fast": self.fast}[fidelity]

    def fidelity(self, num_steps: int) -> Fidelity | None:
        """Return the best mode whose promise so many steps keep, if any."""
        kept = (mode for mode in LEAST_SSIM if num_steps >= self.steps(mode))
        return next(kept, None)

    def ssim(self, fidelity: Fidelity) -> float:
        return {"exact": 1.0, "balanced": self.balanced_ssim, "fast": self.fast_ssim}[fidelity]


@dataclass(frozen=True, slots=True)
class StepTable:
    """How few steps will do for a model.

    Attributes:
        sampler: that it was measured with, as the API spells it; it holds for no other.
        max_guidance_scale: largest one that it holds for.
        rows: by growing numbers of steps asked for.
    """

    sampler: str
    max_guidance_scale: float
    rows: tuple[FewerSteps, ...]

    @property
    def most_asked(self) -> int:
        return self.rows[-1].asked

    def row(self, num_steps: int) -> FewerSteps | None:
        """Return how few steps will do; None beyond the last row.

        Between two rows it is the one with more steps, which needs no fewer.
        """
        for one in self.rows:
            if one.asked >= num_steps:
                return replace(
                    one,
                    asked=num_steps,
                    balanced=min(one.balanced, num_steps),
                    fast=min(one.fast, num_steps),
                )
        return None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request asked for and may be degraded to.

    Attributes:
        asked: the mode.
        num_steps: steps of an exact image.
        fewest_steps: that it may be made with.
        known: how few steps will do; None where that is not measured.
    """

    asked: Fidelity
    num_steps: int
    fewest_steps: int
    known: FewerSteps | None = None

    def fidelity(self, num_steps: int) -> Fidelity | None:
        """Return the best mode whose promise so many steps keep; None if unknown."""
        if num_steps >= self.num_steps:
            return "exact"
        return None if self.known is None else self.known.fidelity(num_steps)

    @property
    def max_loss(self) -> float | None:
        """The error budget: similarity that the worst image may lose; None if unbounded."""
        least = self.fidelity(self.fewest_steps)
        return None if least is None else round(1 - LEAST_SSIM[least], 6)

    def spent(self, num_steps: int) -> float | None:
        """Return the share of the budget that so many steps spend; None if unknown."""
        got, budget = self.fidelity(num_steps), self.max_loss
        if got == "exact":
            return 0.0
        if got is None or self.known is None or not budget:
            return None
        return (1 - self.known.ssim(got)) / budget
