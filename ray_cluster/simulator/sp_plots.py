"""Plots of experiments on one group of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ray_cluster.simulator.intervals import Mean
from ray_cluster.simulator.reports import Line, Plot
from ray_cluster.simulator.sp_compare import class_attainment, mean_attainment
from ray_cluster.simulator.sp_excerpt import middle_scale
from ray_cluster.simulator.sp_experiment import BOUND, SpCondition, SpExperiment, SpRow
from ray_cluster.simulator.sp_workload import MixName

_ON_TIME = "on time, %"


def over_scales(
    experiment: SpExperiment, cells: Sequence[SpCondition], rows: Sequence[SpRow]
) -> Plot:
    """Return what all policies reach at one load, over the scales of the deadlines."""
    cells = sorted(cells)
    scales = [cell.scale for cell in cells]
    lines = {
        policy: _line(scales, [mean_attainment(rows, policy, [cell]) for cell in cells])
        for policy in experiment.policies
    }
    title = f"{_load(cells[0])} (simulated)"
    return Plot(f"{_file(cells[0])}-scales", title, "scale of the deadlines", _ON_TIME, lines)


def over_classes(
    experiment: SpExperiment, cells: Sequence[SpCondition], rows: Sequence[SpRow]
) -> Plot:
    """Return what all policies reach for each size of image, at the middle scale."""
    scale = middle_scale(experiment)
    cell = next(one for one in cells if one.scale == scale)
    lines = {}
    for policy in experiment.policies:
        if policy != BOUND:
            means = class_attainment(rows, policy, cell)
            sides = sorted(map(int, means))
            lines[policy] = _line(sides, [means[str(side)] for side in sides])
    title = f"{_load(cell)}, scale {scale:g} (simulated)"
    return Plot(f"{_file(cell)}-sizes", title, "side of the images, px", _ON_TIME, lines)


def over_rates(experiment: SpExperiment, mix: MixName, rows: Sequence[SpRow]) -> Plot:
    """Return what all policies reach with one mix over the rates, at the middle scale."""
    scale, rates = middle_scale(experiment), sorted(experiment.rates_per_min)
    cells = [SpCondition(mix, rate, scale) for rate in rates]
    lines = {
        policy: _line(rates, [mean_attainment(rows, policy, [cell]) for cell in cells])
        for policy in experiment.policies
    }
    title = f"{mix}, scale {scale:g} (simulated)"
    return Plot(f"{mix}-rates", title, "requests per minute", _ON_TIME, lines)


def _line(x: Sequence[float], means: Sequence[Mean]) -> Line:
    return Line(x, [100 * one.value for one in means], [100 * one.half_width for one in means])


def _load(cell: SpCondition) -> str:
    return f"{cell.mix}, {cell.rate_per_min:g} per minute"


def _file(cell: SpCondition) -> str:
    return f"{cell.mix}-{cell.rate_per_min:g}-per-min"
