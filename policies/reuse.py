"""Which blocks of a model a request recomputes in a step, and which it takes from an earlier one.

What a block makes changes slowly from step to step, deep inside the model slowest (Ma et al. 2024,
DeepCache, section 3.2, for UNets; Chen et al. 2024, Delta-DiT, section 3.3, for transformers). A
request on a schedule computes the whole model in *full* steps, and in the steps between them only
the ``num_outer`` outermost blocks at either end; what comes from inside is that of its last full
step. The decision reads the request's own progress alone, so that its image does not depend on who
else is in the batch, when it came, or what is in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReuseProgress:
    """What a schedule may know of a request before a step.

    Attributes:
        step_index: steps already taken.
        num_steps: of the whole run.
        last_full: index of the last step that was computed whole; None before the first.
        drift: how far the request's estimate of the finished latents has moved in that step and
            since: the sum of ``|new - old| / |old|``, each the mean over all latents.
    """

    step_index: int
    num_steps: int
    last_full: int | None = None
    drift: float = 0.0


@dataclass(frozen=True, slots=True)
class ReuseSchedule:
    """Which steps of a request are computed whole.

    Attributes:
        num_outer: blocks at either end of the model that are computed in every step. Of a UNet,
            skip connections counted from the outside, both of whose ends are computed; of a
            diffusion transformer, blocks.
        interval: a step is full if the last full one is as many steps before it; 1 for all.
        num_first: steps at the beginning that are full; at least 1.
        num_last: steps at the end that are full.
        max_drift: a step is also full once the drift since the last full one is larger; None for
            no such threshold (of the kind of TeaCache, Liu et al. 2024, equation 5, here on the
            estimates that the sampler makes anyway).

    Raises:
        ValueError: a number is too small.
    """

    num_outer: int
    interval: int
    num_first: int = 1
    num_last: int = 0
    max_drift: float | None = None

    def __post_init__(self) -> None:
        fewest = {"num_outer": 0, "interval": 1, "num_first": 1, "num_last": 0}
        for name, least in fewest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, given {getattr(self, name)}")
        if self.max_drift is not None and not self.max_drift > 0:
            raise ValueError(f"max_drift must be positive or None, given {self.max_drift}")

    def is_full(self, progress: ReuseProgress) -> bool:
        """Whether the next step is computed whole."""
        if progress.last_full is None or not self._may_reuse(progress.step_index, progress):
            return True
        if progress.step_index - progress.last_full >= self.interval:
            return True
        return self.max_drift is not None and progress.drift > self.max_drift

    def is_kept(self, progress: ReuseProgress) -> bool:
        """Whether a step after the next one, if that is full, may take anything from it."""
        return self.interval > 1 and self._may_reuse(progress.step_index + 1, progress)

    def _may_reuse(self, step_index: int, progress: ReuseProgress) -> bool:
        return self.num_first <= step_index < progress.num_steps - self.num_last

    def full_steps(self, num_steps: int) -> tuple[int, ...]:
        """Return the indices of the full steps of a run in which no threshold is passed."""
        found: list[int] = []
        for index in range(num_steps):
            if self.is_full(ReuseProgress(index, num_steps, found[-1] if found else None)):
                found.append(index)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class ReuseMap:
    """Which rows of a batch the blocks of a model recompute.

    Blocks lie in rings around the middle of the model: ring ``k`` has the ``k``-th block from
    either end. A row that reuses is computed in its outer rings alone.

    Attributes:
        num_outer: per row the rings that it is computed in; None for all of them.
    """

    num_outer: tuple[int | None, ...]

    def is_active(self, ring: int) -> tuple[bool, ...]:
        """Return per row whether the blocks of a ring recompute it."""
        return tuple(outer is None or outer >= ring for outer in self.num_outer)
