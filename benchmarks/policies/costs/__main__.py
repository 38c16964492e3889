"""Measures what decisions cost: ``python -m benchmarks.policies.costs``; see docs/simulator.md."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# before numpy is imported: what is measured is one thread
os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.machine import describe_run, load_now
from benchmarks.policies.costs.allocation import measure_allocation
from benchmarks.policies.costs.controller import measure_controller
from benchmarks.policies.costs.dispatch import measure_dispatch
from benchmarks.policies.costs.hours import Hour, measure_hours
from benchmarks.policies.costs.report import print_costs
from benchmarks.policies.costs.rounds import measure_rounds
from benchmarks.policies.costs.samples import DecisionCost
from benchmarks.policies.costs.settings import CostSettings, quick_costs
from benchmarks.progress import Reports, progress_bar, wide_console
from benchmarks.run import RESULTS
from benchmarks.settings import Report

Row = DecisionCost | Hour
PARTS: dict[str, Callable[[CostSettings, Report], Iterator[Row]]] = {
    "dispatch": measure_dispatch,
    "rounds": measure_rounds,
    "allocation": measure_allocation,
    "control": measure_controller,
    "hours": measure_hours,
}
# seconds that each takes
_WEIGHTS = {"dispatch": 15.0, "rounds": 30.0, "allocation": 25.0, "control": 30.0, "hours": 120.0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, print tables, and write the figures."""
    options = _parse(arguments)
    console, started = wide_console(), datetime.now(UTC)
    settings = quick_costs() if options.quick else CostSettings()
    result = describe_run("ray-cluster policy costs 1", quick=options.quick, started=started)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-policies-costs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    parts: dict[str, list[dict[str, Any]]] = {}
    weights = {name: weight for name, weight in _WEIGHTS.items() if name in options.only}
    try:
        with _silence(), progress_bar(console) as progress:
            reports = Reports(progress, weights)
            for name in weights:
                parts[name] = []
                for row in PARTS[name](settings, reports.of(name)):
                    parts[name].append(asdict(row) | {"is_met": row.is_met})
            reports.say("done", complete=True)
    finally:
        # a part that fails does not cost the figures of those before it
        seconds = round(time.monotonic() - started_s, 1)
        result |= {"load_after": load_now(), "duration_s": seconds, "parts": parts}
        path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    print_costs(console, result)
    console.print(f"written: {path}")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the dispatch core from logging every image."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies.costs", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="seconds, to see that all works")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(PARTS),
        metavar="PART",
        help=f"one of {', '.join(PARTS)}; may be given several times",
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    options.only = options.only or list(PARTS)
    return options


if __name__ == "__main__":
    main()
