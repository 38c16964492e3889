"""Results as tables in the terminal, as JSON, and as plots."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.figures import interval_of, value_of
from benchmarks.harness import Plot, Report

Row = Mapping[str, Any]
Section = Mapping[str, Any]
_FILE_WIDTH, _LINE_EVERY_S = 130, 20.0


def print_sections(console: Console, sections: Mapping[str, Section], *, quick: bool) -> None:
    """Print the tables, notes and problems of every section, then all aims."""
    for name, section in sections.items():
        console.print(f"\n[bold]{name}[/bold]: {section.get('what', '')}")
        for title, rows in section.get("tables", {}).items():
            console.print(_table(title, rows))
        for note in section.get("notes", ()):
            console.print(note, markup=False)
        for problem in section.get("problems", ()):
            console.print(f"FAILED {problem}", style="red", markup=False)
    aims = [_aim_row(aim) for section in sections.values() for aim in section.get("aims", ())]
    if aims:
        console.print(_table("Aims", aims))
    if quick:
        console.print("[yellow]a quick run: it shows that everything works, not how fast[/yellow]")


def has_problems(sections: Mapping[str, Section]) -> bool:
    """Whether something is wrong in a section."""
    return any(section.get("problems") for section in sections.values())


def figure_text(figure: Any) -> str:
    """Return a figure as tables have it: a summary as ``2.41 (2.3 to 2.55)``, its range."""
    match figure:
        case None:
            return "-"
        case bool():
            return "yes" if figure else "no"
        case float():
            return f"{figure:.4g}"
        case {"median": median, "min": low, "max": high}:
            return f"{median:.4g} ({low:.3g} to {high:.3g})"
        case {"value": value, "low": low, "high": high}:
            return f"{value:.4g} ({low:.3g} to {high:.3g})"
        case Mapping():
            return ", ".join(f"{name} {figure_text(one)}" for name, one in figure.items())
        case list() | tuple():
            return ", ".join(figure_text(one) for one in figure)
    return str(figure)


def as_json(found: Any) -> str:
    """Return results as JSON; infinities and NaN, which JSON lacks, as words."""
    return json.dumps(_finite(found), allow_nan=False) + "\n"


def _finite(found: Any) -> Any:
    match found:
        case Mapping():
            return {name: _finite(one) for name, one in found.items()}
        case list() | tuple():
            return [_finite(one) for one in found]
        case float() if not math.isfinite(found):
            return str(found)
    return found


def _aim_row(aim: Row) -> Row:
    return {
        "aim": aim["name"],
        "wanted": aim["wanted"],
        "measured": f"{aim['measured']:.2f} {aim['unit']}",
        "95 %": "{:.2f} to {:.2f}".format(*aim["interval"]),
        "met": aim["verdict"],
    }


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    # all columns, in the order in which rows name them
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(column.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(figure_text(row.get(column)) for column in columns))
    return table


def draw(result: Mapping[str, Any], plots: Sequence[tuple[Section, Plot]], path: Path) -> None:
    """Draw plots side by side into a small PNG file; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    size = (5.5 * len(plots), 4.5)
    figure, panels = plt.subplots(1, len(plots), figsize=size, squeeze=False, layout="constrained")
    for axes, (section, plot) in zip(panels[0], plots, strict=True):
        _lines(axes, section["tables"][plot.table], plot)
    about = (result["machine"]["cpu"], result["started"][:10], result["commit"][:12])
    figure.suptitle(", ".join(about), fontsize=9)
    figure.savefig(path, dpi=70)
    with Image.open(path) as drawn:
        # few colours: a third of the bytes
        drawn.convert("P", palette=Image.Palette.ADAPTIVE, colors=24).save(path, optimize=True)
    plt.close(figure)


def _lines(axes: Any, rows: Sequence[Row], plot: Plot) -> None:
    for y in plot.ys:
        own = [row for row in rows if row.get(y) is not None]
        for key in dict.fromkeys(tuple(row[name] for name in plot.by) for row in own):
            line = [row for row in own if tuple(row[name] for name in plot.by) == key]
            pairs = [(value_of(row[y]), interval_of(row[y])) for row in line]
            spread = [[abs(value - ends[side]) for value, ends in pairs] for side in (0, 1)]
            label = ", ".join([*map(str, key), *([y] if len(plot.ys) > 1 else [])])
            places, values = [row[plot.x] for row in line], [value for value, _ in pairs]
            axes.errorbar(places, values, spread, fmt="o-", markersize=4, capsize=3, label=label)
    axes.set(xlabel=plot.x.replace("_", " "), title=plot.table)
    axes.set_ylabel(plot.ys[0].replace("_", " ") if len(plot.ys) == 1 else "")
    if plot.is_log:
        axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=7)


class Bar:
    """The progress of several parts as one bar; lines now and then where none can be drawn.

    It is drawn from the measuring thread: a thread of its own would take CPU time from it.

    Args:
        weights: how long each part takes beside the others, in the order in which they come.
    """

    def __init__(self, console: Console, weights: Mapping[str, float]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        left = (TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=True))
        self.progress = Progress(
            *columns, *left, console=console, auto_refresh=False, speed_estimate_period=600
        )
        self._weights, self._printed_s = weights, 0.0
        self._task = self.progress.add_task("", total=sum(weights.values()))

    def of(self, part: str) -> Report:
        """Return the report of one part."""
        names = list(self._weights)
        before = sum(self._weights[name] for name in names[: names.index(part)])

        def report(done: float, text: str) -> None:
            completed, words = before + self._weights[part] * done, f"{part}: {text}"
            self.progress.update(self._task, completed=completed, description=words)
            self.progress.refresh()
            self._print_line()

        return report

    def _print_line(self) -> None:
        console, task = self.progress.console, self.progress.tasks[0]
        if console.is_terminal or time.monotonic() < self._printed_s + _LINE_EVERY_S:
            return
        self._printed_s = time.monotonic()
        console.print(
            f"{task.percentage:3.0f} % after {task.elapsed or 0:.0f} s: {task.description}"
        )


def wide_console() -> Console:
    """Return the terminal, or a file with room for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def comma_list(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the parser of an option that takes names or patterns of them, with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        asked = [one.strip() for one in text.split(",") if one.strip()]
        unknown = [one for one in asked if not matching(known, one)]
        if unknown or not asked:
            raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}; allowed: {', '.join(known)}")
        return tuple(one for one in known if any(matching([one], pattern) for pattern in asked))

    return parse
