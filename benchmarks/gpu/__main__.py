"""Runs the GPU suite: ``python -m benchmarks.gpu``; see benchmarks/README.md.

Each part (the kernels, then each family) runs in a process of its own: a device error ends that
part only, and one that hangs is stopped. On a CPU, with tiny models, all run in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# before diffusers is imported: nothing is downloaded
os.environ.update(HF_HUB_OFFLINE="1")

from benchmarks.machine import ROOT, describe_run, load_now

BUDGET_S = 440.0
_GRACE_S = 30.0
_NEEDED = ("torch", "diffusers", "numpy", "psutil", "rich")
_PARTS = ("kernels", "sdxl", "sd3", "flux")
_COMPILE = ("blocks", "whole", "none")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    if options.profiles_of:
        path = options.profiles_of
        return _finish(json.loads(path.read_text(encoding="utf-8")), path)
    lacking = missing(options)
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    if options.part:
        return _run_child(options)
    started = datetime.now(UTC)
    started_s = time.monotonic()
    result = describe_run("ray-cluster gpu benchmarks 1", quick=options.tiny, started=started)
    result["commit"] = options.commit or result["commit"]
    result["device"] = describe_device(options.device)
    result["budget_s"], result["parts"] = options.budget_s, {}
    result["source"] = _source(result, started)
    path = options.out / f"{_stem(result)}-{started:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _run_parts(options, result, path)
    finally:
        result["duration_s"] = round(time.monotonic() - started_s, 1)
        result["load_after"] = load_now()
        _write(path, result)
    return _finish(result, path)


def missing(options: argparse.Namespace) -> str:
    """Return what this machine lacks, and what to do; empty if nothing."""
    absent = [name for name in _NEEDED if find_spec(name) is None]
    if absent:
        return (
            f"bench-gpu needs {', '.join(absent)}, not installed for {sys.executable}: run "
            "`make bench-gpu`, or install them"
        )
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return (
            f"bench-gpu needs a CUDA device: torch {torch.__version__} finds none (CUDA of this "
            f"build: {torch.version.cuda or 'none'}). On a machine with a GPU install a CUDA build "
            "of torch and look at nvidia-smi; without one, `python -m benchmarks.gpu --device cpu "
            "--tiny` shows that the suite works"
        )
    if options.device == "cpu" and not options.tiny:
        return "the published models are too large for a CPU: give --tiny with --device cpu"
    return ""


def describe_device(kind: str) -> dict[str, Any]:
    """Return the GPU's name, memory and software, or the CPU's name."""
    import torch

    if kind == "cpu":
        from ray_cluster.process.machine import cpu_model

        return {"name": cpu_model(), "kind": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "kind": "cuda",
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
    }


def _run_parts(options: argparse.Namespace, result: dict[str, Any], path: Path) -> None:
    from benchmarks.gpu.settings import WEIGHTS

    ends_s = time.monotonic() + options.budget_s
    broken: list[str] = []
    for index, name in enumerate(options.only):
        weights = [WEIGHTS[one] for one in options.only[index:]]
        budget_s = max(0.0, ends_s - time.monotonic()) * weights[0] / sum(weights)
        print(f"{name}: up to {budget_s:.0f} s", flush=True)
        run = _in_process if options.device == "cpu" and not options.isolate else _in_child
        result["parts"][name], found = run(options, name, budget_s, broken)
        broken += [one for one in found if one not in broken]
        result["broken"] = broken
        _write(path, result)


def _in_process(
    options: argparse.Namespace, name: str, budget_s: float, broken: list[str]
) -> tuple[dict[str, Any], list[str]]:
    from benchmarks.gpu.record import Record

    record = Record(None, budget_s)
    found = _part(options, name, record, broken)
    return record.sections, found


def _in_child(
    options: argparse.Namespace, name: str, budget_s: float, broken: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Run a part in a process of its own; what it wrote before it ended is kept."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--device", options.device]
        command += ["--part", name, "--file", str(file), "--budget-s", str(budget_s)]
        command += ["--compile", options.compile, "--broken", ",".join(broken)]
        command += ["--tiny"] if options.tiny else []
        problem = _wait_for(command, budget_s)
        sections = json.loads(file.read_text()) if file.exists() else {}
    found = sections.pop("broken", {}).get("ops", [])
    if problem:
        sections["process"] = {"status": "failed", "problems": [problem]}
    for section in sections.values():
        if section["status"] == "running":
            section["status"] = "stopped"
    return sections, found


def _wait_for(command: Sequence[str], budget_s: float) -> str:
    """Run a part's process; stop it, with those that it started, if it takes far too long.

    Returns:
        What went wrong, if anything did.
    """
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(timeout=budget_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        return f"stopped: not done {_GRACE_S:.0f} s after its time of {budget_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            # compilers that it started outlive it; nobody else is in its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"its process ended with status {status}" if status else ""


def _run_child(options: argparse.Namespace) -> int:
    from benchmarks.gpu.record import Record

    record = Record(options.file, options.budget_s)
    found = _part(options, options.part, record, [one for one in options.broken.split(",") if one])
    record.sections["broken"] = {"status": "ok", "ops": found}
    record.save()
    return 0


def _part(options: argparse.Namespace, name: str, record: Any, broken: Sequence[str]) -> list[str]:
    import torch
    from diffusers.utils import logging

    from benchmarks.gpu.parts import run_part
    from benchmarks.gpu.settings import gpu_settings, tiny_settings

    logging.set_verbosity_error()
    if options.device == "cpu":
        torch.set_num_threads(1)
    settings = (
        tiny_settings(options.compile, options.device)
        if options.tiny
        else gpu_settings(options.compile)
    )
    return run_part(name, settings, record, broken)


def _finish(result: dict[str, Any], path: Path) -> int:
    from benchmarks.gpu.profile import save_profiles
    from benchmarks.gpu.report import has_failed, print_result
    from benchmarks.progress import wide_console

    console = wide_console()
    if find_spec("pydantic") and find_spec("yaml"):
        result["profiles"], result["problems"] = save_profiles(result, path.parent, path.stem)
        _write(path, result)
    print_result(console, result)
    if "profiles" not in result:
        more = f"python -m benchmarks.gpu --profiles-of {path.name}"
        console.print(f"no profiles: they need pydantic and PyYAML; with these `{more}` makes them")
    for name in (path.name, *result.get("profiles", {}).values()):
        console.print(f"written: {path.parent / name}", markup=False)
    return 1 if has_failed(result) else 0


def _write(path: Path, result: dict[str, Any]) -> None:
    from benchmarks.gpu.record import as_json

    path.write_text(as_json(result) + "\n", encoding="utf-8")


def _stem(result: dict[str, Any]) -> str:
    if result["quick"]:
        return f"tiny-{result['device']['kind']}"
    words = result["device"]["name"].lower().replace("nvidia", "").split()
    return "-".join(words)


def _source(result: dict[str, Any], started: datetime) -> str:
    versions = result["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers"))
    where = f"{result['device']['name']}, bfloat16; {software}"
    return f"{where}; {started:%Y-%m-%d}; commit {result['commit']}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does it all work?")
    parser.add_argument(
        "--only", type=_names, default=_PARTS, metavar="LIST", help=f"of {', '.join(_PARTS)}"
    )
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="seconds for all parts (%(default)s)"
    )
    parser.add_argument(
        "--compile", choices=_COMPILE, default="blocks", help="how much of diffusers' model"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results"
    )
    parser.add_argument("--commit", help="of a copy of the project that git does not know")
    parser.add_argument(
        "--profiles-of",
        type=Path,
        metavar="FILE",
        help="only make the profiles of results",
    )
    parser.add_argument("--isolate", action="store_true", help="processes on a CPU, too")
    # of a part's own process
    parser.add_argument("--part", choices=_PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--broken", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in _PARTS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}; allowed: {', '.join(_PARTS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
