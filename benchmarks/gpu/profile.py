"""The measured latency profiles for the simulator, from the steps of our engine."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import OURS
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey, SizeCount

# of an image of SD3 and FLUX, as their pipelines have it
_IMAGE_STEPS = 28


def save_profiles(result: Mapping[str, Any], folder: Path, stem: str) -> Iterator[Path]:
    """Write a file ``<stem>-<family>.yaml`` for each family with right predictions, and
    ``<stem>-<family>-group.yaml`` for its steps on several devices; yield them."""
    # needs pydantic, which a machine that only measures may not have
    from ray_cluster.models.latency_profiles import save_profile

    about = {"device": result["device"]["name"], "source": result["source"]}
    profiles = [profile_of(name, part, **about) for name, part in result["parts"].items()]
    profiles += group_profiles(result["parts"].get("groups", {}), **about)
    for profile in filter(None, profiles):
        path = folder / f"{stem}-{profile.name}.yaml"
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


def group_profiles(
    part: Mapping[str, Any], *, device: str, source: str
) -> Iterator[LatencyProfile]:
    """Yield the profiles of a group's families: what the simulator makes its menus of.

    A step by degree is measured, the faster way of guided rows. Images are modelled from it, and
    their decoding from that of one size, as `kind: sequence-parallel` reads them.
    """
    for name, section in part.items():
        model, _, kind = name.partition(", ")
        if kind != "steps by degree" or section.get("problems"):
            continue
        fastest: dict[OperationKey, Mapping[str, Any]] = {}
        for row in section.get("tables", {}).get("steps by degree", ()):
            side, degree = row["side_px"], row["degree"]
            guided = section["guided"]
            key = OperationKey("step", side, side, sp_degree=degree, uses_guidance=guided)
            if key not in fastest or row["ms"]["median"] < fastest[key]["median"]:
                fastest[key] = row["ms"]
        where = f"{source}; a step as the head of a group sees it, random weights"
        steps = [_measured(key, ms, where) for key, ms in fastest.items()]
        cost = part[f"{model}, group"]["group_cost"]["costs"][0]["cost"]
        others = {
            one.key._replace(operation="image", num_steps=_IMAGE_STEPS): _IMAGE_STEPS * one.seconds
            for one in steps
        }
        for side in sorted({one.key.width_px for one in steps}):
            seconds = cost["decode_per_megapixel_s"] * side**2 / 1e6
            others[OperationKey("decode", side, side)] = seconds
        formula = f"{_IMAGE_STEPS} times the step, decoding by the pixel; {source}"
        rows = [LatencyRow(key, seconds, "modelled", formula) for key, seconds in others.items()]
        if steps:
            yield LatencyProfile(f"{model}-group", model, device, (*steps, *rows))


def _row(row: Mapping[str, Any], source: str, *, guided: bool) -> LatencyRow:
    if "sizes_px" in row:
        counts = Counter(map(tuple, row["sizes_px"]))
        sizes = (SizeCount(width, height, count) for (width, height), count in counts.items())
        key = OperationKey("step", uses_guidance=guided).of_sizes(sizes)
    else:
        side = row["side_px"]
        key = OperationKey("step", side, side, batch=row["batch"], uses_guidance=guided)
    return _measured(key, row["ms"], source)


def _measured(key: OperationKey, ms: Mapping[str, Any], source: str) -> LatencyRow:
    seconds = [1e-3 * one for one in ms["samples"]]
    mean_s = statistics.fmean(seconds)
    cv = statistics.stdev(seconds) / mean_s if len(seconds) > 1 else 0.0
    return LatencyRow(key, mean_s, "measured", source, cv)
