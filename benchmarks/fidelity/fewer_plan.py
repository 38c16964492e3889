"""What is run to find out how few steps will do: first to choose by, then to report on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.fidelity.plan import FidelityRun

Mode = Literal["balanced", "fast"]
Chosen = Mapping[int, Mapping[Mode, int]]
"""Steps of each mode by the steps that were asked for."""

# worst image against the one with all steps (SSIM)
BARS: Mapping[Mode, float] = {"balanced": 0.95, "fast": 0.85}
# the worst of a few hundred images is worse than that of a few dozen: when choosing, only so much
# of what a mode may lose is given away
SHARE_OF_LOSS = 2 / 3


@dataclass(frozen=True, slots=True)
class Check:
    """A setting apart from the one that is chosen by: an image's side, and a guidance scale."""

    px: int
    guidance: float | None = None


@dataclass(frozen=True, slots=True)
class ModelGrid:
    """What is made with one model.

    Attributes:
        base_steps: numbers of steps asked for.
        main_base: the one that most images are reported at.
        tried_steps: fewer steps, of which a mode's are chosen.
        num_tuning: batches to choose by.
        num_held_out: batches to report on, at the main number of steps.
        num_elsewhere: likewise at each of the others.
        num_checks: likewise in each check.
        checks: at the main number of steps, with the steps that were chosen without them.
    """

    model: str
    base_steps: tuple[int, ...]
    main_base: int
    tried_steps: tuple[int, ...]
    num_tuning: int
    num_held_out: int = 38
    num_elsewhere: int = 4
    num_checks: int = 2
    checks: tuple[Check, ...] = ()


_PX = 64
_CHECKS = (Check(96), Check(128), Check(_PX, 1.0), Check(_PX, 4.0))
_BASES = (10, 20, 30, 50)


def model_grids(*, quick: bool) -> tuple[ModelGrid, ...]:
    """Return what is made with each model; a quick one shows that all works, and measures nothing.

    The transformer's steps take seven times as long as the UNet's: there are fewer to choose by.
    """
    if quick:
        return (
            ModelGrid("shapes-sd", (4, 6), 6, (2, 3), 1, 1, 1, 1, (Check(96), Check(_PX, 1.0))),
        )
    return (
        ModelGrid("shapes-sd", _BASES, 20, (2, 3, 4, 5, 6, 7, 8, 10), 24, 38, 8, 8, _CHECKS),
        ModelGrid("shapes-sd-light", (2,), 2, (1,), 24),
        ModelGrid("shapes-sd3", _BASES, 20, (5, 6, 7, 8, 9, 10, 12, 20), 6, 38, 3, 1, _CHECKS),
    )


def tuning_runs(grid: ModelGrid) -> Iterator[FidelityRun]:
    """Return what the numbers of steps are chosen by: even batches of prompts."""
    for index in range(grid.num_tuning):
        for steps in sorted({*grid.base_steps, *grid.tried_steps}):
            yield FidelityRun(grid.model, _PX, 2 * index, steps)


def held_out_runs(grid: ModelGrid, chosen: Chosen) -> Iterator[FidelityRun]:
    """Return what is reported: odd batches of prompts, of which nothing was chosen.

    The images of a mode's steps serve all numbers of steps that share them.
    """
    runs: dict[FidelityRun, None] = {}
    for base in sorted(grid.base_steps, key=lambda steps: steps != grid.main_base):
        for batch in held_out_batches(grid, base):
            for steps in (base, *chosen.get(base, {}).values()):
                runs[FidelityRun(grid.model, _PX, batch, steps)] = None
    for check in grid.checks:
        for batch in check_batches(grid):
            for steps in (grid.main_base, *chosen.get(grid.main_base, {}).values()):
                run = FidelityRun(grid.model, check.px, batch, steps, guidance=check.guidance)
                runs[run] = None
    yield from runs


def held_out_batches(grid: ModelGrid, base: int) -> list[int]:
    """Return the batches that a number of steps is reported on."""
    count = grid.num_held_out if base == grid.main_base else grid.num_elsewhere
    return [2 * index + 1 for index in range(count)]


def check_batches(grid: ModelGrid) -> list[int]:
    """Return the batches of every check."""
    return [2 * index + 1 for index in range(grid.num_checks)]
