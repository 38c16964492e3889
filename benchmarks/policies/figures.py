"""What the experiments' JSON files say, by policy, load and seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray_cluster.simulator.intervals import Mean, paired_difference

Figures = Mapping[str, Any]
# by the experiments' names
Results = Mapping[str, Figures]


def cells_of(figures: Figures, **wanted: Any) -> list[Figures]:
    """Return the cells whose keys have these values."""
    return [one for one in figures["cells"] if all(one[key] == wanted[key] for key in wanted)]


def samples_of(figures: Figures, **wanted: Any) -> list[float]:
    """Return one value per seed: the attainment, mean over all cells that are wanted.

    Raises:
        LookupError: no cell is like that.
    """
    found = [one["samples"] for one in cells_of(figures, **wanted)]
    if not found:
        raise LookupError(f"no cell has {wanted}")
    return [sum(values) / len(found) for values in zip(*found, strict=True)]


def gain(figures: Figures, first: str, second: str, **wanted: Any) -> Mean:
    """Return by how many points the first policy is above the second, paired by seed."""
    ours = samples_of(figures, policy=first, **wanted)
    theirs = samples_of(figures, policy=second, **wanted)
    return points(paired_difference(ours, theirs))


def points(mean: Mean, factor: float = 100) -> Mean:
    """Return a share in percentage points."""
    return Mean(factor * mean.value, factor * mean.half_width, mean.num)


def read_mean(figures: Mapping[str, Any], factor: float = 100) -> Mean:
    """Return a figure as files have it; a share in percentage points."""
    half_width = math.nan if figures["half_width"] is None else figures["half_width"]
    return points(Mean(figures["value"], half_width, figures["num"]), factor)
