"""The ops and the attention of packed sequences: right first, then how fast."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from benchmarks.figures import summarise
from benchmarks.gpu.record import Record, Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import Ways, time_cell
from benchmarks.harness import sample_in_turns
from benchmarks.kernels.cases import cases_of
from benchmarks.kernels.section import measure_case
from ray_cluster.engine.batch.spans import Spans
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.dit.attention import (
    Attend,
    AttendAtOnce,
    attend_by_length,
    has_variable_length,
)
from ray_cluster.engine.dit.packing import packing_of

# norm of the difference over that of the truth: halves keep 8 bits, probabilities are rounded once
# more, and sums of many such errors are smaller than each
_ATTENTION_ERROR = 1e-2
_LATENT_PX, _LEVELS = 8, 2


@torch.inference_mode()
def measure_kernels(settings: Settings, record: Record) -> None:
    """Measure bandwidth, ops and attention."""
    with record.section("bandwidth", 0.2) as section:
        _bandwidth(settings, section)
    with record.section("ops", 0.6) as section:
        _ops(settings, section)
    with record.section("attention") as section:
        _attention(settings, section)


def _bandwidth(settings: Settings, section: Section) -> None:
    source = torch.ones(settings.copy_bytes, dtype=torch.uint8, device=settings.device)
    goal = torch.empty_like(source)
    samples = sample_in_turns(
        {"copy": lambda: goal.copy_(source)}, settings.sampling, device=settings.device.type
    )
    rates = summarise([2e-9 * settings.copy_bytes / one for one in samples["copy"]])
    row = {"bytes": settings.copy_bytes, "read_and_written_gb_per_s": rates}
    section.table("a copy").append(row)


def _ops(settings: Settings, section: Section) -> None:
    torch.manual_seed(0)
    table = section.table("ops")
    for case in cases_of(settings.kernel_sizes):
        try:
            rows, wrong = measure_case(case, settings.kernel_sizes, settings.kernel_rounds)
        # one op that does not compile is not to cost the figures of the others
        except Exception:  # noqa: BLE001
            section.fail_with_trace(case.op)
            continue
        table += rows
        for problem in wrong:
            section.fail(problem)


def _attention(settings: Settings, section: Section) -> None:
    kinds: dict[str, Attend] = {"by length": attend_by_length}
    if has_variable_length(settings.device, settings.dtype):
        kinds["at once"] = AttendAtOnce()
    else:
        section.leave_out("attention at once", f"PyTorch has none on {settings.device}")
    table = section.table("attention of packed sequences")
    todo = list(itertools.product(settings.attention.items(), settings.attention_px))
    for index, ((model, shape), sides_px) in enumerate(todo):
        heads, width, num_prompt = shape
        spans = _spans(sides_px, num_prompt)
        generator = torch.Generator(settings.device).manual_seed(0)
        size = (3, spans[-1].rows.stop, heads, width)
        drawn = torch.randn(size, device=settings.device, generator=generator)
        query, key, value = drawn.to(settings.dtype).unbind()
        truth = attend_by_length(query.float(), key.float(), value.float(), spans, spans)
        calls = {
            kind: partial(attend, query, key, value, spans, spans) for kind, attend in kinds.items()
        }
        found, _ = time_cell(
            settings,
            section,
            {"model": model, "sides_px": list(sides_px)},
            partial(Ways, calls),
            num_left=len(todo) - index,
            is_exact=True,
        )
        for row in found:
            row["relative_error"] = relative_error(calls[row["by"]](), truth)
            if row["relative_error"] > _ATTENTION_ERROR:
                section.fail(f"attention {row['by']}, {model}: off by {row['relative_error']:g}")
                del row["speed_up"]
        table += found


def _spans(sides_px: tuple[int, ...], num_prompt: int) -> Spans:
    sides = [side // _LATENT_PX for side in sides_px]
    composition, _ = composition_of([(side, side, False) for side in sides])
    return packing_of(layout_of(composition, _LEVELS).levels[-1], num_prompt).joint


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over that of the truth; 1e9 if anything is not finite."""
    gap = (found.double() - truth.double()).norm() / truth.double().norm()
    return float(gap.nan_to_num(1e9, posinf=1e9))
