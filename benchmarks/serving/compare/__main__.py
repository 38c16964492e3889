"""Compares the service with the common practice: ``python -m benchmarks.serving.compare``.

Goes on where an earlier run into the same folder stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_run, load_now
from benchmarks.progress import Reports, progress_bar, wide_console
from benchmarks.serving.compare.calibration import (
    Calibration,
    calibrate,
    is_calibrated,
    measure_profile,
)
from benchmarks.serving.compare.cells import CellStore, ComparedCell, SettingsDiffer
from benchmarks.serving.compare.contenders import CONTENDERS, OwnContender
from benchmarks.serving.compare.experiment import Block, Experiment, missing_blocks
from benchmarks.serving.compare.images import compare_images
from benchmarks.serving.compare.outcomes import made_latencies_s
from benchmarks.serving.compare.pace import LivePace, predict_at_pace
from benchmarks.serving.compare.plot import save_plot
from benchmarks.serving.compare.prediction import Prediction, Simulated, predict
from benchmarks.serving.compare.report import write_markdown
from benchmarks.serving.compare.settings import CV_BY_PROCESS, Settings, quick
from benchmarks.serving.compare.summary import Summary
from benchmarks.serving.compare.traces import Trace, draw_traces
from ray_cluster.training.suite import suite_prompts

RESULTS = Path(__file__).resolve().parents[2] / "results"
_NUM_PROMPTS = 64
# about how long they take
_CALIBRATION_S, _PROFILE_S = 120.0, 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the report; returns the exit status."""
    options = _parser().parse_args(arguments)
    settings = _settings(options)
    folder = options.out or RESULTS / ("compare-quick" if options.quick else "compare")
    started = datetime.now(UTC)
    prompts = [one.caption for one in suite_prompts("easy", _NUM_PROMPTS)]
    try:
        store = CellStore(folder, settings)
    except SettingsDiffer as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.report_only and not is_calibrated(folder):
        sys.stderr.write(f"{folder} has no runs that could be reported\n")
        return 2
    head = describe_run("ray-cluster comparison 1", quick=options.quick, started=started)
    calibration, traces, predictions = _prepare(folder, settings, prompts)
    if not options.report_only:
        experiment = Experiment(
            folder, settings, calibration, store, prompts, most_others=options.most_others
        )
        _run(experiment, missing_blocks(settings, traces, store))
    paces = _paces(folder, settings, traces, store)
    summary = Summary(settings, traces, store, predictions, paces)
    if not summary.traces:
        sys.stderr.write("no trace has run with every contender at every load yet\n")
        return 1
    result = head | collect(folder, settings, calibration, summary, predictions)
    result["paces"] = {name: {"load": p.load, "factor": p.factor} for name, p in paces.items()}
    return _write(folder, result)


def _prepare(
    folder: Path, settings: Settings, prompts: Sequence[str]
) -> tuple[Calibration, list[Trace], dict[str, list[Prediction]]]:
    """Measure what comes first, draw the traces, and simulate them."""
    weights = {"calibration": _CALIBRATION_S, "profile": _PROFILE_S}
    with progress_bar(wide_console()) as progress:
        reports = Reports(progress, weights)
        calibration = calibrate(folder, settings, prompts, reports.of("calibration"))
        traces = draw_traces(
            settings, prompts, rate_per_s=calibration.rate_per_s, alone_s=calibration.alone_s
        )
        reports.of("profile")(0.0, "of this machine, for the simulator")
        predictions = _predictions(folder, settings, traces)
        reports.say("prepared", complete=True)
    return calibration, traces, predictions


def _run(experiment: Experiment, blocks: Sequence[Block]) -> None:
    """Run what is missing, with the time left."""
    if not blocks:
        return
    with progress_bar(wide_console()) as progress:
        reports = Reports(progress, {block.name: block.seconds for block in blocks})
        for block in blocks:
            experiment.run(block, reports.of(block.name))
        reports.say("done", complete=True)


def collect(
    folder: Path,
    settings: Settings,
    calibration: Calibration,
    summary: Summary,
    predictions: dict[str, list[Prediction]],
) -> dict[str, Any]:
    """Return everything that the report tells."""
    likenesses = compare_images(folder / "images", settings.contenders, settings.dtype)
    return {
        "settings": settings.as_dict(),
        "calibration": asdict(calibration) | {"rate_per_s": calibration.rate_per_s},
        "contenders": {name: CONTENDERS[name].what for name in settings.contenders},
        "num_traces": len(summary.traces),
        **summary.as_dict(),
        "images": [asdict(one) | {"is_equal": one.is_equal} for one in likenesses],
        "predictions": {name: [asdict(one) for one in rows] for name, rows in predictions.items()},
        "load_after": load_now(),
    }


def _predictions(
    folder: Path, settings: Settings, traces: Sequence[Trace]
) -> dict[str, list[Prediction]]:
    """Simulate the contenders that the simulator knows, by the profile of each one's pool."""
    loads = sorted(settings.loads)
    return {
        name: predict(folder, traces, loads, simulated)
        for name, simulated in _simulated(folder, settings).items()
    }


def _paces(
    folder: Path, settings: Settings, traces: Sequence[Trace], store: CellStore
) -> dict[str, LivePace]:
    """Simulate them once more, as slow as each was at the lowest load."""
    found: dict[str, LivePace] = {}
    if len(settings.loads) == 1:
        return found
    for name, simulated in _simulated(folder, settings).items():
        lowest = [ComparedCell(name, min(settings.loads), trace.name) for trace in traces]
        live_s = [one for cell in lowest if cell in store for one in made_latencies_s(store[cell])]
        if live_s and all(cell in store for cell in lowest):
            found[name] = predict_at_pace(
                folder, traces, settings.loads, simulated, live_s=float(np.mean(live_s))
            )
    return found


def _simulated(folder: Path, settings: Settings) -> dict[str, Simulated]:
    found = {}
    for name in settings.contenders:
        contender = CONTENDERS[name]
        if isinstance(contender, OwnContender) and contender.simulated_as is not None:
            pool = contender.pool_section(settings.dtype)
            profile = measure_profile(folder, settings, name, pool)
            found[name] = Simulated(contender.simulated_as, profile, pool["max_batch"])
    return found


def _write(folder: Path, result: dict[str, Any]) -> int:
    """Write the report; the status is 1 if requests were lost or images differ."""
    (folder / "report.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    text = write_markdown(result)
    (folder / "report.md").write_text(text, encoding="utf-8")
    save_plot(result, folder / "attainment.png")
    print(text)
    is_lost = not all(run["nothing_lost"] for run in result["runs"])
    is_other = any(one["most"] is not None and not one["is_equal"] for one in result["images"])
    return 1 if is_lost or is_other else 0


def _settings(options: argparse.Namespace) -> Settings:
    settings = Settings(
        contenders=options.contenders,
        loads=options.loads,
        processes=options.processes,
        num_traces=options.traces,
        num_requests=options.requests,
        steps=options.steps,
        guidance_scales=options.guidance,
        dtype=options.dtype,
        slo_times=options.slo_times,
    )
    return quick(settings) if options.quick else settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.compare", description=__doc__
    )
    default = Settings()
    add = parser.add_argument
    add("--out", type=Path, help="folder of results, in which a run goes on")
    add("--quick", action="store_true", help="some minutes, to see that all works")
    add("--report-only", action="store_true", help="run nothing, write the report anew")
    add("--contenders", type=_names(CONTENDERS), default=default.contenders, metavar="LIST")
    add("--loads", type=_numbers, default=default.loads, metavar="LIST", help="such as 0.6,1,1.4")
    add("--processes", type=_names(CV_BY_PROCESS), default=default.processes, metavar="LIST")
    add("--traces", type=int, default=default.num_traces, help="of each process")
    add("--requests", type=int, default=default.num_requests, help="of a trace")
    add("--steps", type=_whole, default=default.steps, metavar="LIST", help="such as 10,20,30")
    add("--guidance", type=_numbers, default=default.guidance_scales, metavar="LIST")
    add("--dtype", choices=("float32", "bfloat16"), default=default.dtype)
    add("--slo-times", type=float, default=default.slo_times, help="deadline in times alone")
    add(
        "--most-others",
        type=float,
        default=math.inf,
        metavar="CORES",
        help="that other processes may keep busy; a run is made again if they take more",
    )
    return parser


def _names(known: Any) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}; allowed: {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _whole(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    # so that a service that runs is stopped: by default nothing of this process would do it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
