"""Times every op: the reference, on CUDA the Triton kernel, the naive composition, and a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import paired_ratio, summarise
from benchmarks.harness import Sampling, Study, sample_in_turns
from benchmarks.kernels.cases import Case, Sizes, cases_of, cpu_sizes, gpu_sizes

# of values relative to what is larger than 1; halves are rounded after each naive call
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}
_SAMPLE_S, _MOST_CALLS = 2e-3, 1000


def measure(study: Study) -> None:
    """Check every implementation against the reference, then time them in turns."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    sizes = gpu_sizes() if on_gpu else cpu_sizes()
    where = f"{torch.cuda.get_device_name()}, device" if on_gpu else "one thread, CPU"
    study.found["what"] = (
        f"ops in {str(sizes.dtype).removeprefix('torch.')} ({where} time); of_copy is the share of "
        "what copying as many bytes reaches"
    )
    cases = {case.op: case for case in cases_of(sizes)}
    with torch.inference_mode():
        for op in study.each(cases):
            rows, problems = measure_case(cases[op], sizes, study.pick(60, 3))
            for row in rows:
                study.row("ops", **row)
            for problem in problems:
                study.fail(problem)


def measure_case(case: Case, sizes: Sizes, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each implementation of a case, and which of them are wrong.

    An implementation that differs from the reference by more than the tolerance gets neither a
    ratio nor a rate.
    """
    calls = contenders_of(case, sizes.device)
    truth = case.call(_implementation(case.op, "reference"))
    differences = {name: largest_difference(call(), truth) for name, call in calls.items()}
    source = torch.ones(case.num_bytes // 2, dtype=torch.uint8, device=sizes.device)
    goal = torch.empty_like(source)
    timed = {**calls, "copy": lambda: goal.copy_(source)}
    sampling = Sampling(_SAMPLE_S, _MOST_CALLS, rounds, rounds)
    seconds = sample_in_turns(timed, sampling, device=sizes.device)
    rows, problems, tolerance = [], [], TOLERANCES[sizes.dtype]
    for name, found in seconds.items():
        row: dict[str, Any] = {"op": case.op, "shape": case.shape, "by": name}
        row["us"] = summarise([1e6 * one for one in found])
        if differences.get(name, 0.0) <= tolerance:
            row["gb_per_s"] = case.num_bytes / row["us"]["median"] / 1e3
            row["of_copy"] = paired_ratio(seconds["copy"], found)
            row["over_naive"] = paired_ratio(seconds["naive"], found)
        else:
            gap = f"differs by {differences[name]:.2g}, allowed {tolerance:g}"
            problems.append(f"{case.op}, {case.shape}, {name}: {gap}")
        rows.append(row)
    return rows, problems


def contenders_of(case: Case, device: str) -> Mapping[str, Callable[[], Any]]:
    """Return what can do the case on a device, by name."""
    kinds = ["reference"]
    if device == "cuda" and find_spec("triton"):
        kinds.append("triton")
    functions = {kind: _implementation(case.op, kind) for kind in kinds}
    calls = {kind: lambda function=one: case.call(function) for kind, one in functions.items()}
    return {"naive": case.naive, **calls}


def largest_difference(found: Any, truth: Any) -> float:
    """Return the largest difference of results, large values relative to themselves.

    A NaN counts as 1e9.
    """
    if isinstance(truth, Tensor):
        gap = (found.double() - truth.double()).abs() / truth.double().abs().clamp(min=1.0)
        return float(gap.nan_to_num(1e9, posinf=1e9).max())
    return max(largest_difference(*pair) for pair in zip(found, truth, strict=True))


def _implementation(op: str, kind: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"ray_cluster.kernels.{op}.{kind}"), op)
    return function
