"""Runs the GPU suite: ``python -m benchmarks.gpu``; see benchmarks/README.md.

On a GPU each part (groups, the kernels, each family, whole pipelines) runs in a process of its own:
a device error ends that part only, and one that hangs is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# before diffusers is imported: nothing is downloaded
os.environ.update(HF_HUB_OFFLINE="1")

from benchmarks.machine import ROOT, describe_run, load_now
from benchmarks.tables import as_json, comma_list, has_problems, print_sections, wide_console

BUDGET_S, GROUPS_S = 440.0, 600.0
_GRACE_S = 30.0
_NEEDED = ("torch", "diffusers", "numpy", "psutil", "rich")
# how the time is shared out; what groups do not take, as with one GPU, is the others'
PARTS = {"groups": 17.0, "kernels": 1.0, "sdxl": 3.0, "sd3": 2.5, "flux": 4.0, "whole": 2.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit status."""
    options = _parse(arguments)
    if options.profiles_of:
        path = options.profiles_of
        return _finish(json.loads(path.read_text(encoding="utf-8")), path)
    lacking = missing(options)
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    started = datetime.now(UTC)
    result = describe_run("ray-cluster gpu benchmarks 2", quick=options.tiny, started=started)
    result["device"] = describe_device(options.device)
    result["source"] = _source(result)
    words = result["device"]["name"].lower().replace("nvidia", "").split()
    stem = f"tiny-{options.device}" if options.tiny else "-".join(words)
    path = options.out / f"{stem}-{started:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result["parts"], ends_s = {}, time.monotonic() + (options.budget_s or _budget_s(options.device))
    for index, name in enumerate(options.only):
        weights = [PARTS[one] for one in options.only[index:]]
        budget_s = max(0.0, ends_s - time.monotonic()) * weights[0] / sum(weights)
        print(f"{name}: up to {budget_s:.0f} s", flush=True)
        result["parts"][name] = _run(options, name, budget_s)
        result["load_after"] = load_now()
        path.write_text(as_json(result), encoding="utf-8")
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
        "count": torch.cuda.device_count(),
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _budget_s(device: str) -> float:
    import torch

    has_groups = device == "cuda" and torch.cuda.device_count() > 1
    return BUDGET_S + GROUPS_S * has_groups


def _run(options: argparse.Namespace, name: str, budget_s: float) -> dict[str, Any]:
    """Run a part; what it wrote before it ended is returned."""
    with tempfile.TemporaryDirectory() as folder:
        file, problem = Path(folder) / "part.json", ""
        arguments = (name, file, options.device, options.tiny, options.compile, budget_s)
        if options.device == "cpu":
            _run_part(*arguments)
        else:
            problem = run_isolated(_run_part, arguments, budget_s + _GRACE_S)
        sections = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if problem:
        sections["process"] = {"status": "failed", "problems": [problem]}
    for section in sections.values():
        if section["status"] == "running":
            section["status"] = "stopped"
    return sections


def run_isolated(target: Callable[..., None], arguments: Sequence[Any], limit_s: float) -> str:
    """Run a function in a process of its own; return what went wrong, if anything did.

    After ``limit_s`` it is stopped, with the processes that it started.
    """
    process = get_context("spawn").Process(target=_in_own_session, args=(target, *arguments))
    process.start()
    process.join(limit_s)
    is_late = process.is_alive()
    assert process.pid is not None
    with suppress(ProcessLookupError):
        # compilers that it started outlive it; nobody else is in its session
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    if is_late:
        return f"stopped: not done after {limit_s:.0f} s"
    return f"its process ended with status {process.exitcode}" if process.exitcode else ""


def _in_own_session(target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    target(*arguments)


def _run_part(
    name: str, file: Path, device: str, is_tiny: bool, compile_kind: Any, budget_s: float
) -> None:
    import torch
    from diffusers.utils import logging

    from benchmarks.gpu.parts import run_part
    from benchmarks.gpu.record import Record
    from benchmarks.gpu.settings import Settings, tiny_settings

    logging.set_verbosity_error()
    if device == "cpu":
        torch.set_num_threads(1)
    settings = (
        tiny_settings(compile_kind, device) if is_tiny else Settings(compile_kind=compile_kind)
    )
    run_part(name, settings, Record(file, budget_s))


def _finish(result: dict[str, Any], path: Path) -> int:
    """Print the results, and write the profiles where their packages are installed."""
    console = wide_console()
    sections = {
        f"{part}, {name}": section
        for part, found in result["parts"].items()
        for name, section in found.items()
    }
    print_sections(console, sections, quick=result["quick"])
    console.print(f"written: {path}", markup=False)
    if find_spec("pydantic") and find_spec("yaml"):
        from benchmarks.gpu.profile import save_profiles

        for profile in save_profiles(result, path.parent, path.stem):
            console.print(f"written: {profile}", markup=False)
    else:
        more = f"python -m benchmarks.gpu --profiles-of {path.name}"
        console.print(f"no profiles: they need pydantic and PyYAML; with these `{more}` makes them")
    is_cut_short = any(section["status"] == "stopped" for section in sections.values())
    return 1 if is_cut_short or has_problems(sections) else 0


def _source(result: dict[str, Any]) -> str:
    software = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "diffusers"))
    where = f"{result['device']['name']}, bfloat16; {software}"
    return f"{where}; {result['started'][:10]}; commit {result['commit']}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="tiny models, to see that all works")
    add("--only", type=comma_list(PARTS), default=tuple(PARTS), help=f"of {', '.join(PARTS)}")
    add(
        "--budget-s",
        type=float,
        help=f"seconds for all parts ({BUDGET_S:.0f}, with several GPUs {GROUPS_S:.0f} more)",
    )
    add(
        "--compile",
        choices=("blocks", "whole", "none"),
        default="blocks",
        help="how much of diffusers' model is compiled for comparison",
    )
    results = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=results, help="folder of the results")
    add("--profiles-of", type=Path, metavar="FILE", help="only make the profiles of results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
