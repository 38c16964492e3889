"""One report over all experiments: what was aimed at, what was found, every table and plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.policies.aims import Figures, Headline, Results, headlines
from ray_cluster.errors import ConfigError

NAME = "report.md"


def read_results(folder: Path, names: Sequence[str]) -> Results:
    """Return the figures of those experiments that have run into a folder.

    Raises:
        ConfigError: a file can't be read or holds something else.
    """
    files = {name: folder / f"{name}.json" for name in names}
    return {name: _figures(file) for name, file in files.items() if file.exists()}


def _figures(file: Path) -> Figures:
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read ({error}); delete it, or run it again") from None
    if not isinstance(figures, dict) or not isinstance(figures.get("experiment"), dict):
        raise ConfigError(f"{file} holds no figures of an experiment; delete it, or run it again")
    return figures


def write_report(folder: Path, results: Results, *, head: str) -> Path:
    """Write the report beside the experiments' own files, and return it.

    Args:
        folder: where the experiments have put their tables and plots.
        results: their figures by name, in the report's order.
        head: by what code and when they were made.

    Raises:
        ConfigError: figures are of other cells than the report asks for, or it can't be written.
    """
    try:
        found = headlines(results)
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f"{folder} has figures that the report lacks something of ({error!r}): they are of "
            "other experiments than those of today; run these again, or delete theirs"
        ) from None
    lines = ["# Policies compared", "", head, "", *(_all_headlines(found) if found else ())]
    for name in results:
        lines += _experiment(folder, name)
    path = folder / NAME
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report can't be written: {error}") from None
    return path


def _all_headlines(found: Sequence[Headline]) -> Iterator[str]:
    yield from ("## Aims", "")
    yield "Every figure is simulated. Intervals are of 95 %, over seeds, paired where policies are "
    yield "compared. *Met* is yes or no only if the whole interval lies on one side of the aim. "
    yield "*Elsewhere* is the same figure under other conditions, the worst first."
    for group, own in groupby(found, key=lambda one: one.group):
        yield from ("", f"### {group}", "")
        yield "| aim | wanted | found | met | elsewhere |"
        yield "|---|---|---|---|---|"
        yield from map(_row, own)


def _row(one: Headline) -> str:
    low, high = one.aim.interval
    interval = "one seed: no interval" if math.isnan(low) else f"{low:.2f} to {high:.2f}"
    found = f"**{one.aim.measured:.2f}** ({interval})"
    others = ", ".join(f"{name} {mean.value:.2f}" for name, mean in one.others)
    return f"| {one.aim.name} | {one.aim.wanted} | {found} | {one.aim.verdict} | {others} |"


def _experiment(folder: Path, name: str) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    tables = folder / f"{name}.txt"
    if tables.exists():
        yield from ("```text", tables.read_text(encoding="utf-8").rstrip("\n"), "```")
    else:
        yield f"Its tables, {tables.name}, are not beside its figures."
    for plot in sorted(folder.glob(f"{name}-*.png")):
        if _owner(plot, folder) == name:
            yield from ("", f"![{plot.stem}]({plot.name})")


def _owner(plot: Path, folder: Path) -> str:
    """The experiment with the longest name that begins a plot's."""
    names = [path.stem for path in folder.glob("*.json") if plot.stem.startswith(f"{path.stem}-")]
    return max(names, key=len)
