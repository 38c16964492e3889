"""The command of a benchmark of several sections: measures each, and writes and shows them all."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import describe_run, load_now
from benchmarks.progress import Reports, comma_list, progress_bar, wide_console
from benchmarks.report import Section, as_json, has_problems, print_sections
from benchmarks.run import RESULTS
from benchmarks.settings import Report

SettingsT = TypeVar("SettingsT")


def run_sections(
    name: str,
    about: str | None,
    arguments: Sequence[str] | None,
    sections: Mapping[str, tuple[Callable[[SettingsT, Report], Section], float]],
    settings_of: Callable[[bool], SettingsT],
    plot: Callable[[dict[str, Any], Path], None],
) -> int:
    """Measure, write the results; return the exit status.

    Args:
        name: of the module in ``benchmarks``.
        about: what the command does, for its help.
        sections: what measures each, and about how many seconds it takes.
        settings_of: returns the settings, of a quick run or a whole one.
        plot: draws the results of all sections into a file.
    """
    options, started = _parse(name, about, arguments, tuple(sections)), datetime.now(UTC)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = describe_run(f"ray-cluster {name} 1", quick=options.quick, started=started)
    console, started_s = wide_console(), time.monotonic()
    warnings.filterwarnings("ignore", category=FutureWarning)
    settings, found = settings_of(options.quick), dict[str, Section]()
    with progress_bar(console) as progress:
        chosen = {key: one for key, one in sections.items() if key in options.only}
        reports = Reports(progress, {key: weight for key, (_, weight) in chosen.items()})
        for key, (measure, _) in chosen.items():
            found[key] = measure(settings, reports.of(key))
        reports.say("done", complete=True)
    duration_s = round(time.monotonic() - started_s, 1)
    result |= {"load_after": load_now(), "duration_s": duration_s, "sections": found}
    path.write_text(as_json(result), encoding="utf-8")
    if len(found) == len(sections):
        plot(result, path.with_suffix(".png"))
    print_sections(console, found, quick=options.quick)
    console.print(f"written: {path}")
    return 1 if has_problems(found) else 0


def _parse(
    name: str, about: str | None, arguments: Sequence[str] | None, sections: tuple[str, ...]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, prog=f"python -m benchmarks.{name}")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    parser.add_argument(
        "--only",
        type=comma_list(sections),
        default=sections,
        metavar="LIST",
        help=f"comma-separated: {', '.join(sections)}; without a plot",
    )
    return parser.parse_args(arguments)
