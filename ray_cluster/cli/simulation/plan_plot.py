"""Draws the history of a controller's plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from ray_cluster.api.routes.plan import PlanResponse, RoundCard
from ray_cluster.cli.output import needs_extra, stderr
from ray_cluster.cli.simulation.plots import draw_plot
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.reports import Line, Plot

Values = Mapping[str, float]

_PANELS: Mapping[str, Callable[[RoundCard], Values]] = {
    "replicas planned": lambda one: {pool.pool: pool.num_planned for pool in one.pools},
    "replicas ready": lambda one: {pool.pool: pool.num_ready for pool in one.pools},
    "called for, images/s": lambda one: {
        demand.service: demand.per_s for demand in one.demand if demand.per_s is not None
    },
    "deferred, %": lambda one: {
        cascade.service: 100 * cascade.deferral_rate for cascade in one.cascades
    },
}


def draw_history(plan: PlanResponse, limit: int, path: Path) -> None:
    """Draw the rounds that changed something, and the last one, as PNG.

    Args:
        limit: rounds that changed something at most, the newest.

    Raises:
        ConfigError: nothing was planned yet, the file can't be written, or matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {needs_extra('matplotlib')}")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: must be a .png file in an existing folder")
    rounds = sorted(plan.history[:limit], key=lambda one: one.at)
    if plan.latest is not None and (not rounds or plan.latest.at > rounds[-1].at):
        rounds.append(plan.latest)
    if not rounds:
        raise ConfigError("--plot: no plan was made yet")
    try:
        draw_plot(history_plot(rounds), path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    stderr().print(f"wrote {path}", markup=False)


def history_plot(rounds: Sequence[RoundCard]) -> Plot:
    """Return replicas, demand and what cascades defer over time.

    Args:
        rounds: the oldest first.
    """
    panels = {label: _lines(rounds, values) for label, values in _PANELS.items()}
    return Plot(
        name="plans",
        title="what the controller planned, in the rounds that changed something",
        x_label="seconds",
        panels={label: lines for label, lines in panels.items() if lines},
    )


def _lines(
    rounds: Sequence[RoundCard], values: Callable[[RoundCard], Values]
) -> Mapping[str, Line]:
    """Return a line for each name."""
    found = [(one.at - rounds[0].at, values(one)) for one in rounds]
    names = dict.fromkeys(name for _, given in found for name in given)
    return {
        name: _stairs([(at_s, given[name]) for at_s, given in found if name in given])
        for name in names
    }


def _stairs(points: Sequence[tuple[float, float]]) -> Line:
    """Return a line of steps: a value stays until the next round."""

    def corners() -> Iterator[tuple[float, float]]:
        yield points[0]
        for (_, before), (at_s, value) in pairwise(points):
            yield at_s, before
            yield at_s, value

    x, y = zip(*corners(), strict=True)
    return Line(x, y)
