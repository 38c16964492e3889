"""The measured latency profiles for the simulator, from the steps of our engine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import OURS
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey, SizeCount


def save_profiles(result: Mapping[str, Any], folder: Path, stem: str) -> Iterator[Path]:
    """Write a file ``<stem>-<family>.yaml`` for each family with right predictions; yield it."""
    # needs pydantic, which a machine that only measures may not have
    from ray_cluster.models.latency_profiles import save_profile

    for name, part in result["parts"].items():
        profile = profile_of(name, part, device=result["device"]["name"], source=result["source"])
        if profile is not None:
            path = folder / f"{stem}-{name}.yaml"
            save_profile(path, profile)
            yield path


def profile_of(
    name: str, part: Mapping[str, Any], *, device: str, source: str
) -> LatencyProfile | None:
    """Return the profile of a family's part of the results, or None without exact steps.

    Args:
        source: machine, date and commit.
    """
    if part.get("exactness", {}).get("status", "failed") == "failed":
        return None
    where = f"{source}; one step of the engine, without CUDA graphs, random weights"
    rows = []
    for section, title in (
        ("steps", "steps of one size"),
        ("mixes", "steps of several sizes"),
    ):
        found = part.get(section, {})
        own = [row for row in found.get("tables", {}).get(title, ()) if row["by"] == OURS]
        rows += [_row(row, where, guided=found["guided"]) for row in own]
    return LatencyProfile(name, name, device, tuple(rows)) if rows else None


def _row(row: Mapping[str, Any], source: str, *, guided: bool) -> LatencyRow:
    if "sizes_px" in row:
        counts = Counter(map(tuple, row["sizes_px"]))
        sizes = (SizeCount(width, height, count) for (width, height), count in counts.items())
        key = OperationKey("step", uses_guidance=guided).of_sizes(sizes)
    else:
        side = row["side_px"]
        key = OperationKey("step", side, side, batch=row["batch"], uses_guidance=guided)
    seconds = [1e-3 * one for one in row["ms"]["samples"]]
    mean_s = statistics.fmean(seconds)
    cv = statistics.stdev(seconds) / mean_s if len(seconds) > 1 else 0.0
    return LatencyRow(key, mean_s, "measured", source, cv)
