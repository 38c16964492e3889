"""The sections of each part of the suite: of groups, the kernels, a family, whole pipelines."""

from __future__ import annotations

from benchmarks.gpu.exactness import check_exactness, check_graphs
from benchmarks.gpu.groups import run_groups
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import measure_compiled, measure_mixes, measure_steps
from benchmarks.gpu.subject import Contest, free_memory
from benchmarks.gpu.whole import run_whole


def run_part(name: str, settings: Settings, record: Record) -> None:
    """Run one part into its record."""
    if name == "kernels":
        measure_kernels(settings, record)
    elif name == "groups":
        run_groups(settings, record)
    elif name == "whole":
        run_whole(settings, record)
    else:
        _run_family(name, settings, record)


def _run_family(name: str, settings: Settings, record: Record) -> None:
    family = settings.family(name)
    contest: Contest | None = None
    with record.section("model", 0.2) as section:
        section.found["what"] = f"{family.source}, {settings.dtype}, random weights"
        section.found["config"] = dict(family.config)
        model = family.build(settings.device, settings.dtype)
    if section.found["status"] != "ok":
        return
    with record.section("exactness", 0.2) as section:
        contest = check_exactness(settings, model, family, section)
    if contest is None:
        return
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
