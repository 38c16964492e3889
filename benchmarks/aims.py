"""What the issue asks for, and whether the figures show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.verdicts import Aim, at_least, at_most

Figures = dict[str, Any]
# where the cost of exports can be told from chance; as the policy would have it, it cannot
TELLING_INTERVAL = "four times as often"


def check_aims(sections: dict[str, Any]) -> list[Aim]:
    """Return the aims for which there are figures."""
    found: list[Aim] = []
    if "engine" in sections:
        found += _speed(sections["engine"])
    if "sizes" in sections:
        found += _sizes(sections["sizes"])
    if "overhead" in sections:
        found += _step(sections["overhead"])
    if "exports" in sections:
        found += _exports(sections["exports"])
    if "family" in sections:
        found += _family(sections["family"])
    if "service" in sections:
        found += _service(sections["service"])
    if "load" in sections:
        found += _load(sections["load"])
    return found


def _speed(section: Figures) -> Iterator[Aim]:
    for cell in section["cells"]:
        least = 1.6 if cell["guidance"] else 2.2
        for row in cell["contenders"]:
            is_aim = (row["kind"], row["in_flight"], cell["px"]) == ("engine", 8, 64)
            if is_aim and row["images_equal"]:
                figures = row["speed_up_cpu"]
                name = f"engine, 8 in flight, 64 px, guidance {'on' if cell['guidance'] else 'off'}"
                yield at_least(name, least, figures["median"], figures["ci95"], "x")


def _sizes(section: Figures) -> Iterator[Aim]:
    least_by_kind = {
        ("float32", False): 1.8,
        ("bfloat16", False): 2.4,
        ("float32", True): 1.4,
        ("bfloat16", True): 1.9,
    }
    for cell in section["cells"]:
        guided = f"guidance {'on' if cell['guidance'] else 'off'}"
        name = f"one step, {cell['batch']} px, {cell['dtype']}, {guided}"
        if cell["batch"].startswith(("8", "12")):
            figures = cell["over_one_by_one"]["mixed"]
            least = least_by_kind[cell["dtype"], cell["guidance"]]
            yield at_least(name, least, figures["median"], figures["ci95"], "x")
        if cell["batch"].startswith("4") and not cell["guidance"]:
            figures = cell["mixed_over_grouped"]
            yield at_least(f"{name}, over by size", 1.25, figures["median"], figures["ci95"], "x")
    for stream in section["streams"]:
        figures, least = stream["over_one_by_one"], 2.0 if stream["dtype"] == "bfloat16" else 1.6
        name = f"stream of mixed sizes and steps, {stream['dtype']}"
        yield at_least(name, least, figures["median"], figures["ci95"], "x")
    right = [100.0 * cell["layout_is_faster"] for cell in section["cells"]]
    share = sum(right) / len(right)
    yield at_least("cells in which the faster layout is chosen", 90.0, share, (share, share), "%")


def _step(section: Figures) -> Iterator[Aim]:
    for case in section["cases"]:
        if case["batch"] == 8:
            low, high = (100 * (end - 1) for end in case["ratio"]["ci95"])
            name = f"step over bare UNet, batch 8, guidance {'on' if case['guidance'] else 'off'}"
            yield at_most(name, 5.0, 100 * case["share"], (low, high), "%")


def _exports(section: Figures) -> Iterator[Aim]:
    for case in section["cases"]:
        if case["interval"] == TELLING_INTERVAL:
            share, low, high = (100 * value for value in case["share_at_policy"])
            name = f"exported states, batch 8, guidance {'on' if case['guidance'] else 'off'}"
            yield at_most(name, 1.0, share, (low, high), "%")


def _family(section: Figures) -> Iterator[Aim]:
    low, high = (100 * end for end in section["ratio"]["ci95"])
    share = 100 * section["ratio"]["median"]
    yield at_most(
        "image of the light model, of the heavy one's cost", 12.5, share, (low, high), "%"
    )


def _service(section: Figures) -> Iterator[Aim]:
    for run in section["runs"]:
        for case in run["sequential"]:
            figures = case["overhead"]
            low, high = (1e3 * end for end in figures["ci95"])
            name = f"service overhead p50, {run['replicas']} replica(s), {case['num_steps']} steps"
            yield at_most(name, 20.0, 1e3 * figures["median"], (low, high), "ms")


def _load(section: Figures) -> Iterator[Aim]:
    for role in ("gateway", "dispatcher"):
        row = section["memory"][role]
        name, most = f"memory of the {role} under load", section["max_slope_mib_per_min"]
        low, high = row["slope_ci95"]
        yield at_most(name, most, row["slope_mib_per_min"], (low, high), "MiB/min")
