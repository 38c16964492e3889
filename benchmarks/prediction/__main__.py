"""How far off the predicted ends of requests are: ``python -m benchmarks.prediction``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_run, load_now
from benchmarks.prediction import live
from benchmarks.prediction.study import FALSE_AIM, LOADS, MEDIAN_AIM, P95_AIM, Mix
from benchmarks.progress import comma_list, wide_console
from benchmarks.report import as_json, print_sections
from benchmarks.run import RESULTS

_SIDES = (64, 96, 128)
_LIVE_MIXES = (Mix("equal", _SIDES, (20, 20)), Mix("mixed", _SIDES, (10, 30)))
_QUICK_MIXES = (Mix("equal", (64,), (3, 3)), Mix("mixed", (64, 96), (2, 4)))
_MAX_BATCH = 8
_SEED = 0
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    options, started = _parse(arguments), datetime.now(UTC)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-prediction.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = describe_run("ray-cluster prediction 2", quick=options.quick, started=started)
    parts = {"live": _live}
    sections = {}
    for name in options.only:
        rows: list[Row] = []
        sections[name] = {
            "what": "predicted ends beside real ones, in percent; wanted: error_median "
            f"{MEDIAN_AIM:g}, error_p95 {P95_AIM:g}, false_refusals {FALSE_AIM:g} at most",
            "tables": {f"{name} traces": rows},
        }
        for row in parts[name](quick=options.quick):
            rows.append(row)
            print(row, flush=True)
            result |= {"load_after": load_now(), "sections": sections}
            path.write_text(as_json(result), encoding="utf-8")
    print_sections(wide_console(), sections, quick=options.quick)
    print(f"written: {path}")
    return 0


def _live(*, quick: bool) -> Iterator[Row]:
    pool = live.pool_of(_SIDES, _MAX_BATCH)
    speed = live.measure_speed(pool, _SIDES)
    print(f"measured at the beginning: {asdict(speed)}", flush=True)
    for mix in _QUICK_MIXES if quick else _LIVE_MIXES:
        for load in LOADS:
            found = live.run_live(pool, speed, mix, load, 8 if quick else 80, _SEED)
            yield {"pool": "live", "steps": mix.name, "load": load, **found}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.prediction")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    names = ("live",)
    parser.add_argument("--only", type=comma_list(names), default=names, metavar="LIST")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
