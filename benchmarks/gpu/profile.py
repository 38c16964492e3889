"""The measured latency profiles for the simulator, from the steps of our engine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.mixes import MIXED
from benchmarks.gpu.steps import OURS
from ray_cluster.policies.latency import LatencyProfile, LatencyRow, OperationKey, SizeCount


def profile_of(name: str, part: Mapping[str, Any], *, device: str, source: str) -> LatencyProfile:
    """Return the profile of a family's part of the results.

    Args:
        source: machine, date and commit; what was measured is added.

    Raises:
        ValueError: it has no steps, or its predictions were not diffusers'.
    """
    steps, exactness = part.get("steps", {}), part.get("exactness", {})
    if exactness.get("status") == "failed" or not steps.get("cells"):
        raise ValueError(
            f"{name}: no profile of steps that were not measured, or of wrong predictions"
        )
    where = f"{source}; one step of the engine, without CUDA graphs, random weights"
    rows = [*_rows(steps, where), *_mixed_rows(part.get("mixes", {}), where)]
    return LatencyProfile(name, name, device, tuple(rows))


def save_profiles(
    result: Mapping[str, Any], folder: Path, stem: str
) -> tuple[dict[str, str], list[str]]:
    """Write a file ``<stem>-<family>.yaml`` for each family that was measured.

    Returns:
        The files' names by family, and why those that are missing are.
    """
    # needs pydantic, which a machine that only measures may not have
    from ray_cluster.models.profiles import save_profile

    written, problems = {}, []
    for name, part in result["parts"].items():
        if "steps" not in part:
            continue
        path = folder / f"{stem}-{name}.yaml"
        try:
            device, source = result["device"]["name"], result["source"]
            save_profile(path, profile_of(name, part, device=device, source=source))
            written[name] = path.name
        except ValueError as error:
            problems.append(str(error))
    return written, problems


def _rows(steps: Mapping[str, Any], source: str) -> Iterator[LatencyRow]:
    for cell in steps["cells"]:
        side, guided = cell["side_px"], steps["guided"]
        key = OperationKey("step", side, side, batch=cell["batch"], uses_guidance=guided)
        yield _row(key, cell["contenders"][OURS], source)


def _mixed_rows(mixes: Mapping[str, Any], source: str) -> Iterator[LatencyRow]:
    for cell in mixes.get("cells", ()):
        counts = Counter(map(tuple, cell["sizes_px"]))
        key = OperationKey("step", uses_guidance=mixes["guided"])
        sizes = (SizeCount(*size, count) for size, count in counts.items())
        yield _row(key.of_sizes(sizes), cell["contenders"][MIXED], source)


def _row(key: OperationKey, contender: Mapping[str, Any], source: str) -> LatencyRow:
    seconds = contender["seconds"]["samples"]
    mean_s = statistics.fmean(seconds)
    cv = statistics.stdev(seconds) / mean_s if len(seconds) > 1 else 0.0
    return LatencyRow(key, mean_s, "measured", source, cv)
