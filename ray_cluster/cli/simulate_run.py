"""Runs experiments in several processes, shows their tables, and writes their files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.cli.plots import draw_plot, draw_timeline
from ray_cluster.errors import ConfigError
from ray_cluster.simulator.experiments import Job, load_experiment
from ray_cluster.simulator.reports import Report, Table

_FILE_WIDTH = 140


def run_experiments(
    paths: Sequence[Path], out: Path, *, num_seeds: int | None, num_processes: int | None
) -> None:
    """Run experiments one after the other.

    Raises:
        ConfigError: a file can't be used, or the folder can't be made.
    """
    jobs = [load_experiment(path, num_seeds=num_seeds) for path in paths]
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(f"experiments need different names; given {', '.join(names)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from None
    for job in jobs:
        report = job.sum_up(_results(job, num_processes or os.cpu_count() or 1))
        _show(stdout(), report)
        written = _write(out, report)
        stderr().print(f"wrote {', '.join(str(path) for path in written)}")


def _results(job: Job, num_processes: int) -> Sequence[Any]:
    """Every part's result, in the parts' order."""
    results: list[Any] = [None] * len(job.parts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Ray and torch are not forked: every process begins anew
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, TimeElapsedColumn(), console=stderr()) as progress,
        ProcessPoolExecutor(num_processes, context, initializer=_quiet) as pool,
    ):
        task = progress.add_task(job.name, total=len(job.parts))
        places = {pool.submit(_call, part): place for place, part in enumerate(job.parts)}
        try:
            for done in as_completed(places):
                results[places[done]] = done.result()
                progress.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _quiet() -> None:
    """The dispatch core logs every image; a simulation has too many of them."""
    logging.disable(logging.WARNING)


def _call(part: Callable[[], Any]) -> Any:
    return part()


def _show(console: Console, report: Report) -> None:
    console.print(f"[bold]{report.name}[/bold]: {report.what}")
    for table in report.tables:
        print_table(console, _rich(table))


def _rich(table: Table) -> RichTable:
    rich = RichTable(title=table.title)
    for column in table.columns:
        rich.add_column(column)
    for row in table.rows:
        rich.add_row(*row)
    return rich


def _write(out: Path, report: Report) -> list[Path]:
    """Write figures, tables and plots; return the files."""
    figures, text = out / f"{report.name}.json", out / f"{report.name}.txt"
    figures.write_text(json.dumps(report.figures, indent=1) + "\n", encoding="utf-8")
    with text.open("w", encoding="utf-8") as file:
        _show(Console(file=file, width=_FILE_WIDTH, highlight=False), report)
    plots = [draw_plot(one, out / f"{report.name}-{one.name}.png") for one in report.plots]
    plots += [draw_timeline(one, out / f"{report.name}-{one.name}.png") for one in report.timelines]
    return [figures, text, *plots]
