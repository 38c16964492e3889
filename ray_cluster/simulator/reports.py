"""What an experiment reports: tables, plots, timelines and figures, before they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray_cluster.simulator.results import Mean

L = TypeVar("L")


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        half_widths: of the intervals of y.
        x_half_widths: of those of x; if given, the points are not joined.
    """

    x: Sequence[float]
    y: Sequence[float]
    half_widths: Sequence[float] = ()
    x_half_widths: Sequence[float] = ()


@dataclass(frozen=True)
class Plot:
    """Lines over one axis, in one panel or several, one below the other.

    Attributes:
        name: of its file.
        panels: lines by label, by the label of their y axis.
        is_wide: whether the x axis is linear up to 1, and logarithmic from there.
    """

    name: str
    title: str
    x_label: str
    panels: Mapping[str, Mapping[str, Line]]
    is_wide: bool = False


@dataclass(frozen=True)
class Bar:
    """A time span of one row of a timeline.

    Attributes:
        row: its number, from the top.
        label: by which it is coloured.
        low, high: shares of the row's height between which it is drawn, from below.
    """

    row: int
    begin_s: float
    end_s: float
    label: str
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Timeline:
    """What ran where and when.

    Attributes:
        rows: their names, from the top.
        labels: of the bars, in the order of the legend.
    """

    title: str
    rows: Sequence[str]
    labels: Sequence[str]
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Report:
    """Everything that an experiment found.

    Attributes:
        name: of the experiment.
        what: what was simulated, and from which figures.
        figures: for the JSON file.
    """

    name: str
    what: str
    tables: Sequence[Table]
    plots: Sequence[Plot]
    timeline: Timeline
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a task was answered with.

    Attributes:
        notes: sentences below the table.
        figures: for the JSON file.
    """

    table: Table
    notes: Sequence[str]
    figures: Mapping[str, Any]


def grid(
    title: str,
    corner: str,
    loads: Mapping[str, L],
    columns: Sequence[str],
    cell: Callable[[str, L], str],
) -> Table:
    """Return a table with a row for each load.

    Args:
        title: of the table.
        corner: head of the first column.
        loads: by the words that stand in the first column.
        columns: heads of the others, such as policies.
        cell: text for a column and a load.
    """
    body = [[words, *(cell(column, load) for column in columns)] for words, load in loads.items()]
    return Table(title, [corner, *columns], body)


def percent_line(x: Sequence[float], means: Iterable[Mean]) -> Line:
    """Return means of shares as a line of percentages with intervals."""
    points = [one.times(100) for one in means]
    return Line(x, [one.value for one in points], [one.half_width for one in points])
