"""The parts of the suite: the kernels, and one per family; each can run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from benchmarks.gpu.exactness import check_exactness, check_graphs
from benchmarks.gpu.kernels import ATTENTION, measure_kernels_part
from benchmarks.gpu.mixes import measure_mixes
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import measure_compiled, measure_steps
from benchmarks.gpu.subject import Contest, free_memory

KERNELS = "kernels"


def run_part(name: str, settings: Settings, record: Record, broken: Collection[str]) -> list[str]:
    """Run one part; return the ops that it found to be broken.

    Args:
        broken: ops that are not to be used, as a part before found.
    """
    if name == KERNELS:
        return measure_kernels_part(settings, record)
    without = replace_broken(broken)
    family = settings.family(name)
    with record.section("model", 0.2) as section:
        section.found |= {"source": family.source, "config": dict(family.config)}
        section.found |= {"dtype": str(settings.dtype), "without": without}
        model = family.build(settings.device, settings.dtype)
        section.found["num_weights"] = sum(one.numel() for one in model.parameters())
    if section.found["status"] != "ok":
        return []
    contest: Contest | None = None
    with record.section("exactness", 0.2) as section:
        contest = check_exactness(settings, model, family, section)
    if contest is None:
        return []
    is_exact = section.found["status"] != "failed"
    free_memory(settings.device)
    with record.section("graphs", 0.1) as section:
        check_graphs(settings, contest, section)
    graphs = section.found["status"] == "ok"
    with record.section("steps", 0.45) as section:
        measure_steps(settings, contest, section, is_exact=is_exact, graphs=graphs)
    with record.section("mixes", 0.5) as section:
        measure_mixes(settings, contest, section, is_exact=is_exact, graphs=graphs)
    with record.section("compiled") as section:
        measure_compiled(settings, contest, section, is_exact=is_exact)
    return []


def replace_broken(ops: Collection[str]) -> list[str]:
    """Have this process do without ops that are broken; return the names of those replaced.

    So that one kernel costs its own gain and not every figure of the models.
    """
    replaced = []
    for op in ops:
        if op in _REPLACEMENTS:
            module, name, substitute = _REPLACEMENTS[op]
            setattr(import_module(module), name, substitute())
            replaced.append(op)
    return replaced


def _reference(op: str) -> Callable[[], Any]:
    return lambda: getattr(import_module(f"ray_cluster.kernels.{op}.reference"), op)


_PARTS = "ray_cluster.engine.unet.parts"
_STEP = "ray_cluster.engine.mixed_step"
_REPLACEMENTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "geglu": ("ray_cluster.engine.packed_weights", "geglu", _reference("geglu")),
    "sampler_update": (
        "ray_cluster.engine.mixed_step",
        "sampler_update",
        _reference("sampler_update"),
    ),
    # PyTorch's own norm: the reference would read offsets on the host
    "group_norm_silu": (_PARTS, "has_row_norm", lambda: lambda _norm: False),
    "segment_stats": (_PARTS, "has_row_norm", lambda: lambda _norm: False),
    ATTENTION: (
        "ray_cluster.engine.dit.executor",
        "attention_for",
        lambda: lambda _device, _dtype: "by length",
    ),
}
