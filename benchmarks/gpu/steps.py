"""One denoising step: of images of one size, of several, and of diffusers compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.figures import at_least, paired_ratio, summarise
from benchmarks.gpu.record import Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.subject import Contest, SizePx, free_memory
from benchmarks.harness import sample_in_turns
from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.policies.costs.cost_model import fitted_cost
from ray_cluster.policies.steps.batch_layout import choose_layout
from ray_cluster.policies.types import StepCost

EAGER, COMPILED, OURS, GRAPHS = "diffusers", "diffusers compiled", "ours", "ours on CUDA graphs"
CHANNELS_LAST = "diffusers, channels last"
ONE_BY_ONE, STATIC, GROUPED = "diffusers one by one", "diffusers by size", "ours by size"
Ways = dict[str, Callable[[], object]]
# of mixes around 512 px, over diffusers one by one
_SMALL_AIM = 1.5
# layouts whose times are nearer than this count as equal
_TIE = 0.03
# a cell costs at least its rounds: none is begun with less than that left
_LEAST_S = 1.0
_COST_S, _COST_BATCH = 3.0, 8


def time_cell(
    settings: Settings,
    section: Section,
    about: Mapping[str, Any],
    ways: Callable[[], Ways],
    *,
    num_left: int,
    is_exact: bool,
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Return a row for each way, and its samples; a cell that fails costs no other.

    Args:
        about: the cell, as rows name it.
        ways: makes what is timed; the first is the baseline.
        num_left: cells that share the section's time, this one included.
        is_exact: whether the results are known to be right; wrong ones get no ratio.
    """
    name = ", ".join(f"{key} {value}" for key, value in about.items())
    if section.left_s < _LEAST_S:
        section.leave_out(name, "no time left")
        return [], {}
    limit_s, device = section.left_s / num_left, settings.device.type
    try:
        samples = sample_in_turns(ways(), settings.sampling, device=device, limit_s=limit_s)
    # out of memory, most likely; the other cells may have enough
    except Exception:  # noqa: BLE001
        section.fail_with_trace(name)
        return [], {}
    finally:
        free_memory(settings.device)
    rows = [
        {**about, "by": way, "ms": summarise([1e3 * one for one in seconds])}
        for way, seconds in samples.items()
    ]
    baseline = next(iter(samples.values()))
    if is_exact:
        for row, seconds in zip(rows, samples.values(), strict=True):
            row["speed_up"] = paired_ratio(baseline, seconds)
    return rows, samples


@torch.inference_mode()
def measure_steps(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool, graphs: bool
) -> None:
    """Measure every size and batch; small ones first, so that time runs out for the largest."""
    section.found |= {"what": _WHAT, "guided": contest.family.is_guided}
    contest = contest.with_channels_last()
    table = section.table("steps of one size")
    todo = [(side, batch) for side in settings.sides_px for batch in settings.batches]
    for index, (side, batch) in enumerate(todo):
        ways = partial(_equal_ways, contest, [(side, side)] * batch, graphs=graphs)
        about, num_left = {"side_px": side, "batch": batch}, len(todo) - index
        rows, _ = time_cell(settings, section, about, ways, num_left=num_left, is_exact=is_exact)
        table += rows


def _equal_ways(contest: Contest, sizes: Sequence[SizePx], *, graphs: bool) -> Ways:
    ways: Ways = {EAGER: contest.pipeline_steps(sizes), OURS: contest.engine_steps(sizes)}
    if contest.channels_last is not None:
        other = replace(contest, denoiser=contest.channels_last)
        ways[CHANNELS_LAST] = other.pipeline_steps(sizes)
    return ways | (_graphed(contest, sizes) if graphs else {})


@torch.inference_mode()
def measure_mixes(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool, graphs: bool
) -> None:
    """Measure batches of several sizes, and which layout the policy takes by a measured cost."""
    section.found |= {"what": _WHAT, "guided": contest.family.is_guided}
    table, layouts = section.table("steps of several sizes"), section.table("layouts")
    cost, aims = _step_cost(settings, contest), section.found.setdefault("aims", [])
    for index, (name, sizes) in enumerate(settings.mixes.items()):
        ways = partial(_mixed_ways, contest, sizes, graphs=graphs)
        about = {"mix": name, "sizes_px": [list(size) for size in sizes]}
        rows, samples = time_cell(
            settings,
            section,
            about,
            ways,
            num_left=len(settings.mixes) - index,
            is_exact=is_exact,
        )
        table += rows
        if not samples or not is_exact:
            continue
        ratio = paired_ratio(samples[GROUPED], samples[OURS])
        choice, is_tie = choose_layout(len(set(sizes)), cost), abs(ratio["median"] - 1) <= _TIE
        is_faster = is_tie or (ratio["median"] > 1) == (choice == "mixed")
        layouts.append(
            {"mix": name, "mixed_over_by_size": ratio, "layout": choice, "is_faster": is_faster}
        )
        if name in settings.small_mixes:
            over = paired_ratio(samples[ONE_BY_ONE], samples[OURS])
            aim = at_least(f"{name} px, over one by one", _SMALL_AIM, over, "x")
            aims.append(aim)


def _mixed_ways(contest: Contest, sizes: Sequence[SizePx], *, graphs: bool) -> Ways:
    by_size: dict[SizePx, list[SizePx]] = defaultdict(list)
    for size in sizes:
        by_size[size].append(size)
    alone = [contest.pipeline_steps([size]) for size in sizes]
    static = [contest.pipeline_steps(alike) for alike in by_size.values()]
    ways: Ways = {
        ONE_BY_ONE: lambda: [step() for step in alone],
        STATIC: lambda: [step() for step in static],
        GROUPED: contest.engine_steps(sizes, layout="grouped"),
        OURS: contest.engine_steps(sizes),
    }
    return ways | (_graphed(contest, sizes) if graphs else {})


def _graphed(contest: Contest, sizes: Sequence[SizePx]) -> Ways:
    around = GraphedExecutor(contest.executor)
    return {GRAPHS: contest.engine_steps(sizes, executor=around)}


def _step_cost(settings: Settings, contest: Contest) -> StepCost:
    """Measure what a step costs, as a replica does when it starts."""
    size = settings.default_px
    other = (size[0], size[1] // 2)
    batches = {"alone": [size], "together": [size] * _COST_BATCH, "beside": [size, other]}
    calls = {name: contest.engine_steps(one, guided=False) for name, one in batches.items()}
    samples = sample_in_turns(
        calls, settings.sampling, device=settings.device.type, limit_s=_COST_S
    )
    fastest = {name: min(seconds) for name, seconds in samples.items()}
    return fitted_cost(
        size,
        alone_s=fastest["alone"],
        together_s=fastest["together"],
        num_together=_COST_BATCH,
        beside=(other, fastest["beside"]),
    )


@torch.inference_mode()
def measure_compiled(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool
) -> None:
    """Measure diffusers compiled beside ours, in as many cells as there is time for."""
    if settings.compile_kind == "none":
        section.leave_out("diffusers compiled", "--compile none")
        return
    section.found["what"] = f"{_WHAT}; torch.compile of {settings.compile_kind}"
    table = section.table("steps beside diffusers compiled")
    for index, (side, batch) in enumerate(settings.compiled):
        ways = partial(_compiled_ways, contest, [(side, side)] * batch)
        about, num_left = {"side_px": side, "batch": batch}, len(settings.compiled) - index
        with compiled(settings, contest):
            rows, _ = time_cell(
                settings, section, about, ways, num_left=num_left, is_exact=is_exact
            )
        table += rows


def _compiled_ways(contest: Contest, sizes: Sequence[SizePx]) -> Ways:
    return {COMPILED: contest.pipeline_steps(sizes), OURS: contest.engine_steps(sizes)}


@contextmanager
def compiled(settings: Settings, contest: Contest) -> Iterator[None]:
    """Compile diffusers' repeated blocks, or its whole model, within the block."""
    model = contest.denoiser.model
    parts = [model]
    if settings.compile_kind == "blocks":
        parts = [one for one in model.modules() if type(one).__name__ in contest.family.repeated]
    for part in parts:
        part.compile(backend=settings.compile_backend)
    try:
        yield
    finally:
        for part in parts:
            # what Module.compile() sets: there is no other way back
            part._compiled_call_impl = None


_WHAT = (
    "one whole denoising step, guidance and the sampler's update included: of diffusers as its "
    "pipeline's loop does it, of ours as the step engine does it"
)
