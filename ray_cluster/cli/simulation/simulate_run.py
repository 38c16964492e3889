"""Runs experiments in several processes, shows their tables, and writes their files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ray_cluster.cli.output import needs_extra, print_table, stderr, stdout, warn
from ray_cluster.cli.simulation.plots import draw_plot, draw_timeline
from ray_cluster.cli.simulation.workers import Workers
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.experiments import first_workload, load_experiment
from ray_cluster.simulator.reports import Report, Table
from ray_cluster.simulator.traces import write_trace

_FILE_WIDTH = 140


def run_experiments(
    paths: Sequence[Path], out: Path, *, num_seeds: int | None, num_processes: int | None
) -> None:
    """Run experiments one after the other.

    Raises:
        ConfigError: a file can't be used, or the folder can't be made or written to.
    """
    changes = {} if num_seeds is None else {"num_seeds": num_seeds}
    jobs = [load_experiment(path, **changes) for path in paths]
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(f"experiments need different names; given {', '.join(names)}")
    _check_folder(out)
    can_draw = find_spec("matplotlib") is not None
    if not can_draw:
        warn(f"no plots are drawn; drawing {needs_extra('matplotlib')}")
    for job in jobs:
        with Workers(num_processes) as workers:
            report = job.sum_up(workers.run(job.parts, job.name))
        written, problem = list[Path](), ""
        try:
            written = _write(out, report, with_plots=can_draw)
        except OSError as error:
            problem = f"{job.name} has run, but can't be written: {error}"
        # what could not be written can be read, and the other way round
        _show(stdout(), report)
        if problem:
            raise ConfigError(problem)
        stderr().print(f"wrote {', '.join(str(path) for path in written)}", markup=False)


def write_workload(paths: Sequence[Path], trace: Path) -> None:
    """Write the requests of an experiment's first load and seed as a trace.

    Raises:
        ConfigError: there are several experiments, theirs is not such a kind, or the trace can't be
            written.
    """
    if len(paths) > 1:
        raise ConfigError(
            f"--write-trace writes the requests of one experiment; given {len(paths)}"
        )
    workload = first_workload(paths[0])
    try:
        write_trace(trace, workload)
    except OSError as error:
        raise ConfigError(f"--write-trace {trace}: {error}") from None
    stderr().print(f"wrote {len(workload)} requests to {trace}", markup=False)


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out}: nothing can be written there")


def _show(console: Console, report: Report) -> None:
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(Text.assemble((report.name, "bold"), f": {report.what}"))
    for table in report.tables:
        print_table(console, rich_table(table))


def rich_table(table: Table) -> RichTable:
    """Return a table for the terminal."""
    rich = RichTable(title=Text(table.title))
    for number, column in enumerate(table.columns):
        # names are read and copied whole
        rich.add_column(Text(column), no_wrap=number == 0)
    for row in table.rows:
        rich.add_row(*map(Text, row))
    return rich


def _write(out: Path, report: Report, *, with_plots: bool) -> list[Path]:
    """Write figures, tables and plots; return the files."""
    figures, text = out / f"{report.name}.json", out / f"{report.name}.txt"
    # removed first and written last, so that where it is, all files are of one run
    figures.unlink(missing_ok=True)
    with text.open("w", encoding="utf-8") as file:
        _show(Console(file=file, highlight=False), report)
    plots = list[Path]()
    if with_plots:
        plots += [draw_plot(one, out / f"{report.name}-{one.name}.png") for one in report.plots]
        plots.append(draw_timeline(report.timeline, out / f"{report.name}-timeline.png"))
    part = out / f"{report.name}.json.part"
    part.write_text(json.dumps(report.figures, indent=1) + "\n", encoding="utf-8")
    part.replace(figures)
    return [figures, text, *plots]
