"""What an experiment has to say: tables, plots and timelines, before anybody draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Line:
    """A line of a plot, with an interval around each of its points.

    Attributes:
        half_widths: of the intervals of y.
        x_half_widths: of those of x.
    """

    x: Sequence[float]
    y: Sequence[float]
    half_widths: Sequence[float] = ()
    x_half_widths: Sequence[float] = ()


@dataclass(frozen=True)
class Plot:
    """Lines over one axis.

    Attributes:
        name: of its file.
        lines: by their label.
        x_scale: ``symlog`` is linear up to 1, and a decade each from there.
        is_ordered: whether the lines are of one quantity that grows from each to the next.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    x_scale: Literal["linear", "symlog"] = "linear"
    is_ordered: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines of one unit, in a stack.

    Attributes:
        lines: by their label.
    """

    y_label: str
    lines: Mapping[str, Line]


@dataclass(frozen=True)
class Stack:
    """Panels one below the other, over one axis.

    Attributes:
        name: of its file.
    """

    name: str
    title: str
    x_label: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Bar:
    """Some time of one row of a timeline.

    Attributes:
        row: its number.
        label: by which it is coloured.
        low: share of the row's height at which it begins, from below.
        high: share at which it ends.
    """

    row: int
    begin_s: float
    end_s: float
    label: str
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Timeline:
    """What was done where and when.

    Attributes:
        name: of its file.
        rows: their names, from the top.
        labels: of the bars, in the order of the legend.
    """

    name: str
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
        figures: for machines; goes into a JSON file.
    """

    name: str
    what: str
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()
    timelines: Sequence[Timeline] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    stacks: Sequence[Stack] = ()
