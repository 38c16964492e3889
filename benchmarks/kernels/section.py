"""Times every op: the reference, on CUDA the Triton kernel, the naive composition, and a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, cases_of, cpu_sizes, gpu_sizes
from benchmarks.kernels.timing import seconds_in_turns
from benchmarks.settings import Report, Settings
from benchmarks.stats import paired_ratio, summarise

# of values relative to what is larger than 1; halves are rounded after each naive call
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}


def measure_kernels(settings: Settings, report: Report) -> dict[str, Any]:
    """Check every implementation against the reference, then time them in turns."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    sizes = gpu_sizes() if on_gpu else cpu_sizes()
    tolerance = TOLERANCES[sizes.dtype]
    rows = []
    with torch.inference_mode():
        cases = cases_of(sizes)
        for number, case in enumerate(cases):
            report(number / len(cases), case.op)
            rows.append(measure_case(case, sizes.device, settings.kernel_rounds, tolerance))
    where = f"{torch.cuda.get_device_name()}, device" if on_gpu else "one thread, CPU"
    return {
        "what": f"Ops in {str(sizes.dtype).removeprefix('torch.')} ({where} time); share of what "
        "copying as many bytes reaches",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "rows": rows,
    }


def measure_case(case: Case, device: str, rounds: int, tolerance: float) -> dict[str, Any]:
    """Return times, bytes per second and ratios of a case.

    An implementation that differs from the reference by more than the tolerance gets neither a
    ratio nor a rate.
    """
    calls = contenders_of(case, device)
    truth = case.call(_implementation(case.op, "reference"))
    differences = {name: largest_difference(call(), truth) for name, call in calls.items()}
    source = torch.ones(case.num_bytes // 2, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    timed = {**calls, "copy": lambda: goal.copy_(source)}
    seconds = seconds_in_turns(timed, rounds, device)
    found = []
    for name, call_s in seconds.items():
        row: dict[str, Any] = {"kind": name, "seconds": summarise(call_s).as_dict()}
        if name != "copy":
            row["max_difference"] = differences[name]
        if row.get("max_difference", 0.0) <= tolerance:
            row["bytes_per_s"] = case.num_bytes / row["seconds"]["median"]
            row["share_of_copy"] = paired_ratio(seconds["copy"], call_s).as_dict()
            row["speed_up"] = paired_ratio(seconds["naive"], call_s).as_dict()
        found.append(row)
    return {"op": case.op, "shape": case.shape, "bytes": case.num_bytes, "contenders": found}


def contenders_of(case: Case, device: str) -> Mapping[str, Callable[[], Any]]:
    """Return what can do the case on a device, by name."""
    kinds = ["reference"]
    if device == "cuda" and find_spec("triton"):
        kinds.append("triton")
    functions = {kind: _implementation(case.op, kind) for kind in kinds}
    calls = {kind: lambda function=one: case.call(function) for kind, one in functions.items()}
    return {"naive": case.naive, **calls}


def largest_difference(found: Any, truth: Any) -> float:
    """Return by how much results differ at most, large values relative to themselves.

    A NaN where the truth has none makes it 1e9: the file of results knows no infinity.
    """
    if isinstance(truth, Tensor):
        gap = (found.double() - truth.double()).abs() / truth.double().abs().clamp(min=1.0)
        return float(gap.nan_to_num(1e9, posinf=1e9).max())
    return max(largest_difference(*pair) for pair in zip(found, truth, strict=True))


def _implementation(op: str, kind: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"ray_cluster.kernels.{op}.{kind}"), op)
    return function
