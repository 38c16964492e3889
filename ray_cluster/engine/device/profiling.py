"""Measures the latency profile of a loaded model, over sizes and batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ray_cluster.engine.device.timing import OperationTimer, SizePx
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.policies.costs.latency import LatencyRow, OperationKey, SizeCount

_GUIDED = 3.0


@dataclass(frozen=True, slots=True)
class ProfilingPlan:
    """What is measured.

    Attributes:
        sizes: of images, width and height in pixels.
        batches: images in a batch, and of each size in one of several; those that do not fit into
            memory are left out.
        repeats: how often each operation is counted.
        guidance: without guidance, with it, or both.
    """

    sizes: tuple[SizePx, ...]
    batches: tuple[int, ...]
    repeats: int = 10
    guidance: tuple[bool, ...] = (False, True)

    @property
    def mixes(self) -> tuple[tuple[SizePx, ...], ...]:
        """Sizes that step together: the smallest and the largest, and these with the middle one."""
        sizes = sorted(self.sizes, key=lambda size: (size[0] * size[1], size))
        if len(sizes) < 2:
            return ()
        pair = (sizes[0], sizes[-1])
        return (pair,) if len(sizes) == 2 else (pair, (sizes[0], sizes[len(sizes) // 2], sizes[-1]))


def measure_rows(
    model: LoadedModel,
    plan: ProfilingPlan,
    *,
    source: str,
    clock: Callable[[], float],
    report: Callable[[int, int, str], None],
) -> tuple[LatencyRow, ...]:
    """Measure a model in this thread.

    Args:
        model: loaded.
        plan: what to measure.
        source: machine, date and commit, for the rows.
        clock: monotonic seconds.
        report: called with the number of rows measured, of all rows, and the name of the next.
    """
    timer = OperationTimer(model, clock, plan.repeats)
    keys, rows = planned_keys(model, plan), list[LatencyRow]()
    for index, key in enumerate(keys):
        report(index, len(keys), describe_key(key))
        times_s = _times_s(timer, key)
        mean_s = statistics.fmean(times_s)
        cv = statistics.stdev(times_s) / mean_s if len(times_s) > 1 else 0.0
        rows.append(LatencyRow(key, mean_s, "measured", source, cv))
    report(len(keys), len(keys), "done")
    return tuple(rows)


def planned_keys(model: LoadedModel, plan: ProfilingPlan) -> list[OperationKey]:
    """Return the operations that a plan has measured: those that fit into memory.

    Guidance that takes no second model row is none to a step.
    """
    by_rows = model.profile.guidance == "rows"
    guidance = tuple(guided for guided in plan.guidance if by_rows or not guided)
    sized = [
        (size, batch)
        for size in plan.sizes
        for batch in plan.batches
        if batch <= model.max_batch_by_size[size]
    ]
    encodes = [
        OperationKey("encode", batch=batch, uses_guidance=guided)
        for guided in guidance
        for batch in plan.batches
    ]
    steps = [
        OperationKey("step", *size, batch=batch, uses_guidance=guided)
        for guided in guidance
        for size, batch in sized
    ]
    mixed = [
        OperationKey("step", uses_guidance=guided).of_sizes(SizeCount(*size, batch) for size in mix)
        for guided in guidance
        for mix in plan.mixes
        for batch in plan.batches
        if model.max_batch_by_size.share(mix) * batch <= 1
    ]
    decodes = [OperationKey("decode", *size, batch=batch) for size, batch in sized]
    return [*encodes, *steps, *mixed, *decodes]


def describe_key(key: OperationKey) -> str:
    """Return an operation in words."""
    guided = ", guidance" if key.uses_guidance else ""
    if not key.width_px:
        return f"{key.operation}, batch {key.batch}{guided}"
    sizes = [f"{one.width_px}x{one.height_px}, batch {one.batch}" for one in key.sizes]
    return f"{key.operation} {', with '.join(sizes)}{guided}"


def _times_s(timer: OperationTimer, key: OperationKey) -> list[float]:
    size, scale = (key.width_px, key.height_px), _GUIDED if key.uses_guidance else 1.0
    match key.operation:
        case "encode":
            return timer.encodes_s(key.batch, guidance_scale=scale)
        case "decode":
            return timer.decodes_s(size, key.batch)
        case _:
            sizes = [(one.width_px, one.height_px) for one in key.sizes for _ in range(one.batch)]
            return timer.steps_s(sizes, guidance_scale=scale)
