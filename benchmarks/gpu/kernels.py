"""The ops and the attention of packed sequences: right first, then how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.record import Record, Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import compared, sample_in_turns
from benchmarks.kernels.cases import cases_of
from benchmarks.kernels.section import TOLERANCES, measure_case
from benchmarks.kernels.timing import seconds_in_turns
from benchmarks.stats import summarise
from ray_cluster.engine.dit.attention import (
    Attend,
    AttendAtOnce,
    attend_by_length,
    has_variable_length,
)
from ray_cluster.engine.dit.packing import packing_of
from ray_cluster.engine.spans import Spans
from ray_cluster.engine.token_layout import composition_of, layout_of

ATTENTION = "attention"
# norm of the difference over that of the truth: halves keep 8 bits, probabilities are rounded once
# more, and sums of many such errors are smaller than each
_ATTENTION_ERROR = 1e-2
_LATENT_PX, _LEVELS = 8, 2


@torch.inference_mode()
def measure_kernels_part(settings: Settings, record: Record) -> list[str]:
    """Measure bandwidth, ops and attention; return the names of those that are broken."""
    broken: list[str] = []
    with record.section("bandwidth", 0.2) as section:
        _bandwidth(settings, section)
    with record.section("ops", 0.6) as section:
        broken += _ops(settings, section)
    with record.section("attention") as section:
        broken += _attention(settings, section)
    return broken


def _bandwidth(settings: Settings, section: Section) -> None:
    source = torch.ones(settings.copy_bytes, dtype=torch.uint8, device=settings.device)
    goal = torch.empty_like(source)
    calls: Mapping[str, Callable[[], Any]] = {"copy": lambda: goal.copy_(source)}
    rounds = settings.kernel_rounds
    seconds = seconds_in_turns(calls, rounds, settings.device.type)["copy"]
    rates = summarise([2 * settings.copy_bytes / one for one in seconds])
    section.found["bytes"] = settings.copy_bytes
    section.found["read_and_written_bytes_per_s"] = rates.as_dict()


def _ops(settings: Settings, section: Section) -> list[str]:
    torch.manual_seed(0)
    sizes, broken = settings.kernel_sizes, []
    tolerance = TOLERANCES[sizes.dtype]
    rows = section.found["rows"] = []
    section.found["dtype"] = str(sizes.dtype)
    for case in cases_of(sizes):
        try:
            row = measure_case(case, sizes.device, settings.kernel_rounds, tolerance)
        # one op that does not compile is not to cost the figures of the others
        except Exception:  # noqa: BLE001
            section.fail_with_trace(case.op)
            broken.append(case.op)
            continue
        rows.append(row)
        for one in row["contenders"]:
            gap = one.get("max_difference", 0.0)
            if one["kind"] == "triton" and gap > tolerance:
                section.fail(f"{case.op}, {case.shape}: differs by {gap:g}, allowed {tolerance:g}")
                broken.append(case.op)
    return broken


def _attention(settings: Settings, section: Section) -> list[str]:
    cells = section.found["cells"] = []
    kinds: dict[str, Attend] = {"by length": attend_by_length}
    if has_variable_length(settings.device, settings.dtype):
        kinds["at once"] = AttendAtOnce()
    else:
        section.leave_out("attention at once", f"PyTorch has none on {settings.device}")
    broken = []
    for index, (name, shape) in enumerate(settings.attention.items()):
        spans = _spans(settings.attention_px, shape[2])
        generator = torch.Generator(settings.device).manual_seed(0)
        size = (3, spans[-1].rows.stop, shape[0], shape[1])
        drawn = torch.randn(size, device=settings.device, generator=generator)
        rows = drawn.to(settings.dtype).unbind()
        truth = attend_by_length(*(one.float() for one in rows), spans, spans)
        calls, errors = {}, {}
        for kind, attend in kinds.items():
            try:
                found = attend(*rows, spans, spans)
                errors[kind] = relative_error(found, truth)
            # as above: without it the models attend by length
            except Exception:  # noqa: BLE001
                section.fail_with_trace(f"attention {kind}, {name}")
                errors[kind] = float("inf")
            if errors[kind] > _ATTENTION_ERROR:
                section.fail(f"attention {kind}, {name}: wrong by {errors[kind]:g} of its norm")
                broken += [ATTENTION] if kind == "at once" else []
            else:
                calls[kind] = partial(attend, *rows, spans, spans)
        limit_s = section.left_s / (len(settings.attention) - index)
        cell = {"model": name, "sides_px": settings.attention_px, "relative_errors": errors}
        if "by length" in calls:
            samples = sample_in_turns(calls, min(limit_s, 5.0), settings.device, settings.sampling)
            cell["contenders"] = compared(samples, "by length", is_exact=True)
        cells.append(cell)
    return broken


def _spans(sides_px: tuple[int, ...], num_prompt: int) -> Spans:
    sides = [side // _LATENT_PX for side in sides_px]
    composition, _ = composition_of([(side, side, False) for side in sides])
    return packing_of(layout_of(composition, _LEVELS).levels[-1], num_prompt).joint


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over that of the truth; 1e9 if anything is not finite."""
    gap = (found.double() - truth.double()).norm() / truth.double().norm()
    return float(gap.nan_to_num(1e9, posinf=1e9))
