"""How near an image is to the one with all its steps, and what keeps that at a lower cost.

The modes other than exact have fewer denoising steps, or steps that reuse activations of earlier
ones: whichever was measured to be cheaper, per model and number of steps asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ray_cluster.policies.steps.reuse import ReuseSchedule

Fidelity = Literal["exact", "balanced", "fast"]
Concession = Literal["fidelity", "steps"]
"""What may be given up to be in time: fidelity down to fast, or steps down to a number."""

# the worst image's structural similarity to the exact one
LEAST_SSIM: Mapping[Fidelity, float] = {"exact": 1.0, "balanced": 0.95, "fast": 0.85}


@dataclass(frozen=True, slots=True)
class ReusedSteps:
    """Steps on a reuse schedule, which keep a mode at a lower cost than fewer steps.

    Attributes:
        cost_share: what they cost, as a share of as many steps computed whole.
        ssim: worst image measured with them.
    """

    num_steps: int
    schedule: ReuseSchedule
    cost_share: float
    ssim: float


@dataclass(frozen=True, slots=True)
class FewerSteps:
    """How few steps will do where ``asked`` were asked for.

    Attributes:
        balanced: steps of ``balanced``; at least those of ``fast``, at most those asked for.
        fast: steps of ``fast``.
        balanced_ssim: worst image measured with so few; where not measured, what the mode promises.
        fast_ssim: likewise.
        balanced_reuse: what ``balanced`` is made with instead; None for its fewer steps.
        fast_reuse: likewise.
    """

    asked: int
    balanced: int
    fast: int
    balanced_ssim: float = LEAST_SSIM["balanced"]
    fast_ssim: float = LEAST_SSIM["fast"]
    balanced_reuse: ReusedSteps | None = None
    fast_reuse: ReusedSteps | None = None

    def steps(self, fidelity: Fidelity) -> int:
        """Return the steps of a mode without reuse."""
        return {"exact": self.asked, "balanced": self.balanced, "fast": self.fast}[fidelity]

    def reuse(self, fidelity: Fidelity) -> ReusedSteps | None:
        """Return what a mode is made with instead; None for its fewer steps."""
        return {"balanced": self.balanced_reuse, "fast": self.fast_reuse}.get(fidelity)

    def fidelity(self, num_steps: int) -> Fidelity | None:
        """Return the best mode whose promise so many steps keep; None if they keep none."""
        kept = (mode for mode in LEAST_SSIM if num_steps >= self.steps(mode))
        return next(kept, None)

    def ssim(self, fidelity: Fidelity) -> float:
        """Return the worst image's similarity in a mode."""
        return {"exact": 1.0, "balanced": self.balanced_ssim, "fast": self.fast_ssim}[fidelity]


@dataclass(frozen=True, slots=True)
class StepTable:
    """What is known of a model with fewer steps.

    Attributes:
        sampler: that it was measured with, as the API spells it; it says nothing of others.
        max_guidance_scale: largest one that it holds for.
        rows: by growing numbers of steps asked for.
    """

    sampler: str
    max_guidance_scale: float
    rows: tuple[FewerSteps, ...]

    @property
    def most_asked(self) -> int:
        """Most steps asked for that anything is known of."""
        return self.rows[-1].asked

    @property
    def schedules(self) -> tuple[ReuseSchedule, ...]:
        """All reuse schedules in it."""
        modes = [mode for row in self.rows for mode in (row.balanced_reuse, row.fast_reuse)]
        return tuple(mode.schedule for mode in modes if mode is not None)

    def row(self, num_steps: int) -> FewerSteps | None:
        """Return how few steps will do; None if more are asked for than anything is known of.

        Between two rows it is the one with more steps, which needs no fewer; its reuse schedules
        hold for its own number of steps alone.
        """
        for one in self.rows:
            if one.asked == num_steps:
                return one
            if one.asked > num_steps:
                return replace(
                    one,
                    asked=num_steps,
                    balanced=min(one.balanced, num_steps),
                    fast=min(one.fast, num_steps),
                    balanced_reuse=None,
                    fast_reuse=None,
                )
        return None


@dataclass(frozen=True, slots=True)
class LoraStart:
    """Shares of an image's steps that are taken without its LoRAs, which change little in them.

    (SwiftDiffusion, section 4.2, lets these steps run while a LoRA is loaded.)

    Attributes:
        balanced: in [0, 1); None where that mode is not offered with LoRAs.
        fast: likewise.
    """

    balanced: float | None = None
    fast: float | None = None

    def share(self, fidelity: Fidelity) -> float | None:
        """Return the share of a mode; None where it is not offered, and for exact images."""
        return {"balanced": self.balanced, "fast": self.fast}.get(fidelity)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request asked for and may be degraded to.

    Attributes:
        asked: the mode.
        num_steps: steps asked for, those of an exact image.
        fewest_steps: that it may be made with.
        known: how few steps will do; None where not measured.
        reuse: the mode's steps, of which some reuse activations; such a request is not degraded.
        is_measured: whether what images lose in the mode was measured for such a request; not with
            LoRAs.
    """

    asked: Fidelity
    num_steps: int
    fewest_steps: int
    known: FewerSteps | None = None
    reuse: ReusedSteps | None = None
    is_measured: bool = True

    def fidelity(self, num_steps: int) -> Fidelity | None:
        """Return the best mode whose promise so many steps keep; None if that is not known.

        Where nothing was measured, it is the one asked for, as long as it has all of its steps.
        """
        if not self.is_measured:
            enough = self.num_steps if self.known is None else self.known.steps(self.asked)
            return self.asked if num_steps >= enough else None
        if self.reuse is not None:
            return self.asked
        if num_steps >= self.num_steps:
            return "exact"
        return None if self.known is None else self.known.fidelity(num_steps)

    @property
    def max_loss(self) -> float | None:
        """The error budget: similarity that the worst image may lose; None if it has no bound."""
        least = self.fidelity(self.fewest_steps) if self.is_measured else None
        return None if least is None else round(1 - LEAST_SSIM[least], 6)

    def spent(self, num_steps: int) -> float | None:
        """Return the share of the budget that so many steps spend; None if that is not known."""
        got, budget = self.fidelity(num_steps), self.max_loss
        if got == "exact":
            return 0.0
        if got is None or not budget:
            return None
        if self.reuse is not None:
            return (1 - self.reuse.ssim) / budget
        return None if self.known is None else (1 - self.known.ssim(got)) / budget
