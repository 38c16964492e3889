"""One report over all experiments: what was aimed at, what was found, every table and plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.policies.cell_headlines import mixed_sizes_headlines
from benchmarks.policies.control_headlines import control_headlines
from benchmarks.policies.figures import Results
from benchmarks.policies.headlines import Headline
from benchmarks.policies.sp_headlines import sequence_parallel_headlines

NAME = "report.md"


def headlines(results: Results) -> list[Headline]:
    """Return all aims that there are figures for."""
    return [
        *mixed_sizes_headlines(results),
        *sequence_parallel_headlines(results),
        *control_headlines(results),
    ]


def read_results(folder: Path, names: Sequence[str]) -> Results:
    """Return the figures of those experiments that have run into a folder."""
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def write_report(folder: Path, results: Results, *, head: str) -> Path:
    """Write the report beside the experiments' own files, and return it.

    Args:
        folder: where the experiments have put their tables and plots.
        results: their figures by name, in the report's order.
        head: by what code and when they were made.
    """
    found = headlines(results)
    lines = ["# Policies compared", "", head, "", *(_all_headlines(found) if found else ())]
    for name in results:
        lines += _experiment(folder, name)
    path = folder / NAME
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
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
    text = (folder / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
    yield from ("```text", text, "```")
    for plot in sorted(folder.glob(f"{name}-*.png")):
        if _owner(plot, folder) == name:
            yield from ("", f"![{plot.stem}]({plot.name})")


def _owner(plot: Path, folder: Path) -> str:
    """The experiment with the longest name that begins a plot's."""
    names = [path.stem for path in folder.glob("*.json") if plot.stem.startswith(f"{path.stem}-")]
    return max(names, key=len)
