"""One denoising step of images of several sizes: one by one, by size, and all in one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.record import Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.subject import Contest, SizePx, free_memory
from benchmarks.gpu.timing import compared, sample_in_turns
from benchmarks.stats import paired_ratio
from ray_cluster.engine.cuda_graphs import GraphedExecutor
from ray_cluster.policies.batch_layout import choose_layout
from ray_cluster.policies.cost_model import fitted_cost
from ray_cluster.policies.types import StepCost

ONE_BY_ONE, STATIC, GROUPED, MIXED = "one by one", "by size", "ours, grouped", "ours, mixed"
MIXED_GRAPHS = "ours, mixed, on CUDA graphs"
SMALL_AIM = 1.5
# layouts that are nearer to each other than this are equal to the policy
_TIE = 0.03
_LARGEST = 8
_COST_S = 3.0


@torch.inference_mode()
def measure_mixes(
    settings: Settings, contest: Contest, section: Section, *, is_exact: bool, graphs: bool
) -> None:
    """Measure every mix, and say which layout the policy would take by a measured cost."""
    guided = not contest.family.embeds_guidance
    section.found |= {"what": _WHAT, "guided": guided, "aim_of_small_mixes": SMALL_AIM}
    cost = _cost(settings, contest)
    section.found["step_cost"] = {
        "fixed_s": cost.fixed_s,
        "per_megapixel_s": cost.per_megapixel_s,
        "per_further_size_s": cost.per_further_size_s,
    }
    cells = section.found["cells"] = []
    for index, (name, sizes) in enumerate(settings.mixes.items()):
        limit_s = section.left_s / (len(settings.mixes) - index)
        if limit_s <= 0:
            section.leave_out(name, "no time left")
            continue
        try:
            cell = _cell(settings, contest, sizes, cost, limit_s, graphs=graphs, is_exact=is_exact)
        # out of memory, most likely; the other mixes may have enough
        except Exception:  # noqa: BLE001
            section.fail_with_trace(name)
            continue
        finally:
            free_memory(settings.device)
        about = {"mix": name, "sizes_px": sizes, "is_small": name in settings.small_mixes}
        cells.append(about | cell)


def _cell(
    settings: Settings,
    contest: Contest,
    sizes: Sequence[SizePx],
    cost: StepCost,
    limit_s: float,
    *,
    graphs: bool,
    is_exact: bool,
) -> dict[str, Any]:
    ways = _ways(contest, sizes, graphs=graphs)
    samples = sample_in_turns(ways, limit_s, settings.device, settings.sampling)
    cell: dict[str, Any] = {"contenders": compared(samples, ONE_BY_ONE, is_exact=is_exact)}
    if is_exact:
        ratio = paired_ratio(samples[GROUPED], samples[MIXED])
        choice = choose_layout(len(set(sizes)), cost)
        chosen = samples[MIXED if choice == "mixed" else GROUPED]
        cell |= {
            "grouped_over_mixed": ratio.as_dict(),
            "layout": choice,
            "layout_is_faster": (ratio.median > 1) == (choice == "mixed")
            or abs(ratio.median - 1) <= _TIE,
            "grouped_over_chosen": paired_ratio(samples[GROUPED], chosen).as_dict(),
        }
    return cell


def _ways(
    contest: Contest, sizes: Sequence[SizePx], *, graphs: bool
) -> dict[str, Callable[[], object]]:
    guided = not contest.family.embeds_guidance
    by_size: dict[SizePx, list[SizePx]] = defaultdict(list)
    for size in sizes:
        by_size[size].append(size)
    alone = [contest.pipeline_steps([size], guided=guided) for size in sizes]
    static = [contest.pipeline_steps(alike, guided=guided) for alike in by_size.values()]
    ways: dict[str, Callable[[], object]] = {
        ONE_BY_ONE: lambda: [step() for step in alone],
        STATIC: lambda: [step() for step in static],
        GROUPED: contest.engine_steps(sizes, guided=guided, layout="grouped"),
        MIXED: contest.engine_steps(sizes, guided=guided),
    }
    if graphs:
        around = GraphedExecutor(contest.executor)
        ways[MIXED_GRAPHS] = contest.engine_steps(sizes, guided=guided, executor=around)
    return ways


def _cost(settings: Settings, contest: Contest) -> StepCost:
    """Measure what a step costs, as a replica does when it starts."""
    size = settings.default_px
    other = (size[0], size[1] // 2)
    batches = {"alone": [size], "together": [size] * _LARGEST, "beside": [size, other]}
    calls = {name: contest.engine_steps(one, guided=False) for name, one in batches.items()}
    samples = sample_in_turns(calls, _COST_S, settings.device, settings.sampling)
    fastest = {name: min(seconds) for name, seconds in samples.items()}
    return fitted_cost(
        size,
        alone_s=fastest["alone"],
        together_s=fastest["together"],
        num_together=_LARGEST,
        beside=(other, fastest["beside"]),
    )


_WHAT = (
    "one whole denoising step of the same images; one by one and by size are diffusers', as its "
    "pipeline's loop does it"
)
