"""Which blocks of a model a request recomputes in a step, and which it takes from an earlier one.

What a block makes changes slowly from step to step, deep inside the model slowest (Ma et al. 2024,
DeepCache, section 3.2, for UNets; Chen et al. 2024, Delta-DiT, section 3.3, for transformers). A
request on a schedule computes the whole model in *full* steps, and in the steps between them only
the ``num_outer`` outermost blocks at either end; what comes from inside is that of its last full
step. The schedule reads the request's own progress alone, so that its image does not depend on who
else is in the batch, when it came, or what is in a cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"outer(\d{1,3})-every(\d{1,3})")


@dataclass(frozen=True, slots=True)
class ActivePatches:
    """Which patches of an image a step computes within its cut; the rest is as it was kept.

    Attributes:
        patch_size: side of a patch in pixels of the latents; at the borders there may be less.
        is_active: per patch, row by row.
        has_prompt: whether the prompt's tokens are computed too, in models that have such beside
            the image's: another prompt than that of what was kept needs it.
    """

    patch_size: int
    is_active: tuple[bool, ...]
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class ReuseSchedule:
    """Which steps of a request are computed whole: every ``interval``-th, from the first one on.

    Attributes:
        num_outer: blocks at either end of the model that are computed in every step. Of a UNet,
            skip connections counted from the outside, both of whose ends are computed; of a
            diffusion transformer, blocks.
        interval: steps from one full step to the next; 1 where all are full.

    Raises:
        ValueError: a number is too small.
    """

    num_outer: int
    interval: int

    def __post_init__(self) -> None:
        for name, least in (("num_outer", 0), ("interval", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, given {getattr(self, name)}")

    def __str__(self) -> str:
        return f"outer{self.num_outer}-every{self.interval}"

    @classmethod
    def parse(cls, text: str) -> ReuseSchedule:
        """Return the schedule of a name such as ``outer2-every3``.

        Raises:
            ValueError: the text is no such name, or no step of the schedule would reuse anything.
        """
        match = _NAME.fullmatch(text)
        if match is None or int(match[2]) < 2:
            raise ValueError(
                f"{text!r} is no reuse schedule; write outerN-everyM, such as outer2-every3: N "
                "outer blocks are computed in every step, all blocks in every M-th, M at least 2"
            )
        return cls(int(match[1]), int(match[2]))

    def is_full(self, step_index: int, last_full: int | None) -> bool:
        """Whether a step is computed whole.

        Args:
            step_index: steps already taken.
            last_full: index of the last step that was computed whole; None before the first.
        """
        return last_full is None or step_index - last_full >= self.interval

    def is_kept(self, step_index: int, num_steps: int) -> bool:
        """Whether a later step takes anything from a full step of a run."""
        return self.interval > 1 and step_index + 1 < num_steps

    def num_full(self, num_steps: int) -> int:
        """Return how many steps of a run are computed whole."""
        return -(-num_steps // self.interval)


def num_outer_blocks(config: Mapping[str, Any]) -> range:
    """Return the ``num_outer`` that schedules of a model may have.

    Args:
        config: its UNet's or transformer's configuration in diffusers' form.
    """
    blocks = config.get("block_out_channels")
    if blocks is None:
        # of FLUX, the blocks of two streams and those of one
        num_blocks = config.get("num_layers", 0) + config.get("num_single_layers", 0)
        return range((num_blocks + 1) // 2)
    layers = config.get("layers_per_block", 2)
    per_level = [layers] * len(blocks) if isinstance(layers, int) else layers
    num_skips = sum(per_level) + len(blocks)
    has_middle = config.get("mid_block_type", "UNetMidBlock2DCrossAttn") is not None
    return range(1, num_skips + has_middle)


@dataclass(frozen=True, slots=True)
class ReuseMap:
    """Which rows of a batch, and which patches of them, the blocks of a model recompute.

    Blocks lie in rings around the middle of the model: ring ``k`` has the ``k``-th block from
    either end. A row that reuses is computed whole in its outer rings alone, and further in only
    its active patches are.

    Attributes:
        num_outer: per row the rings that it is computed whole in; None for all of them.
        active: per row what is computed of it further in; None for nothing. Empty where that is so
            of all rows.
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
