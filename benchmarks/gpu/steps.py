"""The denoising step of images of one size: diffusers eager and compiled, ours, ours on graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.record import Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.subject import Contest, SizePx, free_memory
from benchmarks.gpu.timing import compared, sample_in_turns
from ray_cluster.engine.cuda_graphs import GraphedExecutor

EAGER, COMPILED, OURS, GRAPHS = "diffusers", "diffusers compiled", "ours", "ours on CUDA graphs"
# of the section's time: no cell may take more than this many times its share
_PATIENCE = 2.0
# a cell costs at least its rounds: none is begun with less than that left
_LEAST_S = 1.0


@torch.inference_mode()
def measure_steps(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool, graphs: bool
) -> None:
    """Measure every size and batch; small ones first, so that time runs out for the largest.

    Args:
        is_exact: whether our results are known to be right; wrong ones get no ratio.
        graphs: whether graphs are measured, too.
    """
    guided = not contest.family.embeds_guidance
    section.found |= {"what": _WHAT, "guided": guided, "model_rows_per_image": 1 + guided}
    cells = section.found["cells"] = []
    wanted = [(side, batch) for side in settings.sides_px for batch in settings.batches]
    for index, (side, batch) in enumerate(wanted):
        name = f"{side} px, batch {batch}"
        if section.left_s < _LEAST_S:
            section.leave_out(name, "no time left")
            continue
        limit_s = section.left_s / (len(wanted) - index)
        started_s = time.monotonic()
        sizes = [(side, side)] * batch
        calls = _calls(contest, sizes, guided=guided, graphs=graphs)
        found = _measure(calls, limit_s, settings, section, name, is_exact=is_exact)
        if found:
            cells.append({"side_px": side, "batch": batch, "contenders": found})
        # with its graph, whose memory the next cell may need
        del calls
        free_memory(settings.device)
        if time.monotonic() - started_s > _PATIENCE * limit_s + _LEAST_S:
            section.found.setdefault("slow_cells", []).append(name)


@torch.inference_mode()
def measure_compiled(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool
) -> None:
    """Measure diffusers compiled, beside itself before, in as many cells as there is time for.

    The model stays compiled.
    """
    if settings.compile_kind == "none":
        section.leave_out("diffusers compiled", "not asked for")
        return
    guided = not contest.family.embeds_guidance
    section.found["what"] = (
        f"torch.compile of {_scope(settings, contest)}; the first call of a cell compiles, "
        "and is told apart"
    )
    cells = section.found["cells"] = []
    model = contest.denoiser.model
    for index, (side, batch) in enumerate(settings.compiled):
        name, sizes = f"{side} px, batch {batch}", [(side, side)] * batch
        # the longest that a cell has taken: the next may compile as long
        slowest_s = max((one["seconds_in_all"] for one in cells), default=_LEAST_S)
        if section.left_s < slowest_s:
            section.leave_out(name, f"{section.left_s:.0f} s left, one took {slowest_s:.0f} s")
            continue
        started_s = time.monotonic()
        with compiled(model, settings, contest):
            step = contest.pipeline_steps(sizes, guided=guided)
            step()
            if settings.device.type == "cuda":
                torch.cuda.synchronize()
            first_s = time.monotonic() - started_s
            calls = {COMPILED: step, OURS: contest.engine_steps(sizes, guided=guided)}
            limit_s = min(10.0, section.left_s / (len(settings.compiled) - index))
            found = _measure(calls, limit_s, settings, section, name, is_exact=is_exact)
        if found:
            cells.append(
                {
                    "side_px": side,
                    "batch": batch,
                    "first_call_s": first_s,
                    "seconds_in_all": time.monotonic() - started_s,
                    "contenders": found,
                }
            )


def _calls(
    contest: Contest, sizes: Sequence[SizePx], *, guided: bool, graphs: bool
) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        EAGER: contest.pipeline_steps(sizes, guided=guided),
        OURS: contest.engine_steps(sizes, guided=guided),
    }
    if graphs:
        around = GraphedExecutor(contest.executor)
        calls[GRAPHS] = contest.engine_steps(sizes, guided=guided, executor=around)
    return calls


@contextmanager
def compiled(model: Any, settings: Settings, contest: Contest) -> Iterator[None]:
    """Compile the model's repeated blocks, or the whole of it, for as long as this lasts."""
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


def _scope(settings: Settings, contest: Contest) -> str:
    whole = settings.compile_kind == "whole"
    return "the whole model" if whole else f"the repeated blocks ({contest.family.repeated})"


def _measure(
    calls: dict[str, Callable[[], Any]],
    limit_s: float,
    settings: Settings,
    section: Section,
    name: str,
    *,
    is_exact: bool,
) -> dict[str, Any]:
    """Return the figures of a cell; one that fails is told and costs no other."""
    try:
        samples = sample_in_turns(calls, limit_s, settings.device, settings.sampling)
    # out of memory, most likely; the other cells may have enough
    except Exception:  # noqa: BLE001
        section.fail_with_trace(name)
        return {}
    return compared(samples, next(iter(calls)), is_exact=is_exact)


_WHAT = (
    "seconds of one whole denoising step, guidance and the sampler's update included: of diffusers "
    "as its pipeline's loop does it, of ours as the step engine does it"
)
