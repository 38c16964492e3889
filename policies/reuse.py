"""Which blocks of a model a request recomputes in a step, and which it takes from an earlier one.

What a block makes changes slowly from step to step, slowest deep inside the model (DeepCache,
section 3.2, for UNets; Delta-DiT, section 3.3, for transformers). A request on a schedule computes
the whole model in *full* steps, and in the steps between them only the ``num_outer`` outermost
blocks at either end; the rest is that of its last full step. The inner blocks may go on computing
the patches whose estimate moved most (after PatchedServe, section 5). Decisions read the request's
own progress alone, so that its image depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivePatches:
    """Which patches of an image a step computes within its cut; the rest is reused.

    Attributes:
        patch_size: side of a patch in pixels of the latents; less at the borders.
        is_active: per patch, row by row.
        has_prompt: whether the prompt's tokens are computed too, in models that have such beside
            the image's: needed for another prompt than that of the reused step.
    """

    patch_size: int
    is_active: tuple[bool, ...]
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class ReuseProgress:
    """What a schedule may know of a request before a step.

    Attributes:
        step_index: steps already taken.
        num_steps: of the whole run.
        last_full: index of the last full step; None before the first.
        drift: sum of ``|new - old| / |old|`` of the estimated final latents (means over all
            latents), in that step and since.
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
        interval: steps from one full step to the next; 1 for all.
        num_first: full steps at the beginning; at least 1.
        num_last: full steps at the end.
        max_drift: drift since the last full step after which a step is full, too (like TeaCache's
            equation 5, on the sampler's estimates); None for no such threshold.
        active_share: of the patches, computed inside in the steps between; 0 to reuse whole blocks.
        patch_size: side of a patch, in pixels of the latents.

    Raises:
        ValueError: a number is too small.
    """

    num_outer: int
    interval: int
    num_first: int = 1
    num_last: int = 0
    max_drift: float | None = None
    active_share: float = 0.0
    patch_size: int = 4

    def __post_init__(self) -> None:
        fewest = {"num_outer": 0, "interval": 1, "num_first": 1, "num_last": 0, "patch_size": 1}
        for name, least in fewest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, given {getattr(self, name)}")
        if self.max_drift is not None and not self.max_drift > 0:
            raise ValueError(f"max_drift must be positive or None, given {self.max_drift}")
        if not 0 <= self.active_share <= 1:
            raise ValueError(f"active_share must be from 0 to 1, given {self.active_share}")

    @property
    def is_by_patch(self) -> bool:
        return self.active_share > 0

    def most_moved(self, moved: Sequence[float]) -> ActivePatches:
        """Return the patches whose estimate moved most in a full step; of equals the first.

        Args:
            moved: per patch, row by row, the change of the estimated clean latents in the last full
                step.
        """
        count = math.ceil(self.active_share * len(moved))
        chosen = set(sorted(range(len(moved)), key=lambda patch: -moved[patch])[:count])
        return ActivePatches(self.patch_size, tuple(index in chosen for index in range(len(moved))))

    def is_full(self, progress: ReuseProgress) -> bool:
        if progress.last_full is None or not self._may_reuse(progress.step_index, progress):
            return True
        if progress.step_index - progress.last_full >= self.interval:
            return True
        return self.max_drift is not None and progress.drift > self.max_drift

    def is_kept(self, progress: ReuseProgress) -> bool:
        """Whether a step after the next one, if that is full, may reuse anything of it."""
        return self.interval > 1 and self._may_reuse(progress.step_index + 1, progress)

    def _may_reuse(self, step_index: int, progress: ReuseProgress) -> bool:
        return self.num_first <= step_index < progress.num_steps - self.num_last


@dataclass(frozen=True, slots=True)
class ReuseMap:
    """Which rows of a batch, and which patches of them, the blocks of a model recompute.

    Blocks lie in rings around the middle of the model: ring ``k`` has the ``k``-th block from
    either end. A row that reuses is computed whole in its outer rings only; further in, only its
    active patches are.

    Attributes:
        num_outer: per row the rings that it is computed whole in; None for all of them.
        active: per row its patches further in; None for nothing. Empty if that is so of all rows.
    """

    num_outer: tuple[int | None, ...]
    active: tuple[ActivePatches | None, ...] = ()

    def is_active(self, ring: int) -> tuple[bool, ...]:
        """Return per row whether the blocks of a ring recompute anything of it."""
        return tuple(
            not within or self._has_any(row) for row, within in enumerate(self._is_cut(ring))
        )

    def is_partial(self, ring: int) -> tuple[bool, ...]:
        """Return per row whether they recompute only some of its patches."""
        return tuple(within and self._has_any(row) for row, within in enumerate(self._is_cut(ring)))

    def _is_cut(self, ring: int) -> list[bool]:
        return [outer is not None and outer < ring for outer in self.num_outer]

    def _has_any(self, row: int) -> bool:
        patches = self.active[row] if self.active else None
        return patches is not None and any(patches.is_active)
