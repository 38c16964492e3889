"""How far off the predicted ends of requests are: ``python -m benchmarks.prediction``.

Every finished trace is a line of ``cells.jsonl`` in the folder ``--out``; a run that was stopped
goes on there with the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_run, load_now
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.prediction import live
from benchmarks.prediction.simulated import MIXES, POOLS, simulate
from benchmarks.prediction.summary import MEDIAN_AIM, P95_AIM
from benchmarks.prediction.traces import LOADS, Mix

RESULTS = Path(__file__).resolve().parent.parent / "results" / "prediction"
_SIDES = (64, 96, 128)
_LIVE_MIXES = (Mix("equal", _SIDES, (20, 20)), Mix("mixed", _SIDES, (10, 30)))
_QUICK_MIXES = (Mix("equal", (64,), (3, 3)), Mix("mixed", (64, 96), (2, 4)))
_MAX_BATCH = 8
Cell = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write the report anew; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cells.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [json.loads(line) for line in lines]
    head = describe_run("ray-cluster prediction 1", quick=options.quick, started=datetime.now(UTC))
    done = {(one["where"], one["mix"], one["load"]) for one in cells}
    for cell in _cells(options, done):
        cells.append(cell)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        print(_line(cell), flush=True)
    result = head | {
        "load_after": load_now(),
        "aims": {"median": MEDIAN_AIM, "p95": P95_AIM},
        "cells": cells,
    }
    (options.out / "prediction.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    _save_plot(result, options.out / "prediction.png")
    return 0


def _cells(options: argparse.Namespace, done: set[tuple[str, str, float]]) -> Iterator[Cell]:
    if "simulated" in options.only:
        for pool in POOLS:
            for mix in MIXES[pool.name]:
                for load in LOADS:
                    if (pool.name, mix.name, load) not in done:
                        count = 60 if options.quick else options.simulated_requests
                        found = simulate(pool, mix, load, count, options.seed)
                        yield _cell(pool.name, mix, load, found.as_dict())
    if "live" in options.only:
        yield from _live_cells(options, done)


def _live_cells(options: argparse.Namespace, done: set[tuple[str, str, float]]) -> Iterator[Cell]:
    mixes = _QUICK_MIXES if options.quick else _LIVE_MIXES
    missing = [
        (mix, load) for mix in mixes for load in LOADS if ("live", mix.name, load) not in done
    ]
    if not missing:
        return
    pool = live.pool_of(_SIDES, _MAX_BATCH)
    speed = live.measure_speed(pool, _SIDES)
    count = 8 if options.quick else options.live_requests
    for mix, load in missing:
        before = load_now()
        found = live.run_live(pool, speed, mix, load, count, options.seed)
        more = {"speed": asdict(speed), "load_before": before, "load_after": load_now()}
        yield _cell("live", mix, load, found.as_dict() | more)


def _cell(where: str, mix: Mix, load: float, figures: dict[str, Any]) -> Cell:
    return {"where": where, "mix": mix.name, "load": load, **figures}


def _line(cell: Cell) -> str:
    shares = ("error_median", "error_p95", "refused", "late", "false", "attainment")
    figures = ", ".join(f"{name} {100 * cell[name]:.1f} %" for name in shares)
    simulated = "" if cell["where"] == "live" else " (simulated)"
    return f"{cell['where']}{simulated}, {cell['mix']} steps, load {cell['load']:g}: {figures}"


def _save_plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    rows = result["cells"]
    places = sorted({one["where"] for one in rows})
    figure, axes = plt.subplots(
        1, len(places), figsize=(4 * len(places), 3.4), squeeze=False, layout="constrained"
    )
    for axis, where in zip(axes[0], places, strict=True):
        for mix, colour in (("equal", "#1b6ca8"), ("mixed", "#b0413e")):
            own = sorted(
                (one for one in rows if (one["where"], one["mix"]) == (where, mix)),
                key=lambda one: one["load"],
            )
            loads = [one["load"] for one in own]
            for name, style in (("error_median", "-"), ("error_p95", "--")):
                values = [100 * one[name] for one in own]
                axis.plot(loads, values, style, color=colour, label=f"{mix}, {name[6:]}")
        for aim in result["aims"].values():
            axis.axhline(100 * aim, color="#999999", linewidth=0.7)
        axis.set_title(where if where == "live" else f"{where} (simulated)", fontsize=9)
        axis.set_xlabel("load, of full batches")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("|predicted - real| / real, %")
    axes[0][0].legend(fontsize=7)
    save_figure(figure, result, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.prediction")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for figures and plot")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    parser.add_argument(
        "--only", nargs="+", choices=("simulated", "live"), default=("simulated", "live")
    )
    parser.add_argument("--simulated-requests", type=int, default=1500)
    parser.add_argument("--live-requests", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
