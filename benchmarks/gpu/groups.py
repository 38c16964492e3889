"""Groups: what their ranks exchange, steps by degree, changes of ranks, and the menus that follow.

Ranks are processes with a device of their own, as a replica starts them. Times of a step are those
of a group's head: from its latents there to the prediction there.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.figures import summarise
from benchmarks.gpu.exchanges import measure_exchanges
from benchmarks.gpu.families import Family
from benchmarks.gpu.kernels import relative_error
from benchmarks.gpu.record import Record, Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.subject import free_memory
from ray_cluster.engine.groups.degree_costs import Way

if TYPE_CHECKING:
    from ray_cluster.engine.groups.measuring import GroupTimer
    from ray_cluster.policies.types import GroupCost

_FEWEST, _LEAST_S = 3, 1.0
# relative error of a prediction to that on one rank; in bfloat16 rounding alone makes 0.02 at full
# depth, another timestep 0.9
_ALLOWED = {"cuda": 0.1, "cpu": 1e-3}


def run_groups(settings: Settings, record: Record) -> None:
    """Measure the exchanges of all families, then each of them on a group; or say why not."""
    why = ""
    if settings.num_ranks < 2:
        num = 0 if settings.device.type == "cpu" else torch.cuda.device_count()
        why = f"{num} CUDA devices to be used, and each rank of a group needs one of its own"
    elif not (find_spec("pydantic") and find_spec("yaml")):
        why = "loading a model needs pydantic and PyYAML"
    if why:
        print(f"groups: skipped: {why}", flush=True)
        with record.section("groups") as section:
            section.found["skipped"] = why
            section.leave_out("groups", why)
        return
    families = [settings.family(name) for name in settings.grouped]
    with record.section("exchanges", 0.15) as section:
        measure_exchanges(settings, families, section)
    for index, family in enumerate(families):
        _run_family(settings, record, family, 1 / (len(families) - index))


def _run_family(settings: Settings, record: Record, family: Family, share: float) -> None:
    from benchmarks.engine.groups import switch_rows

    with (
        record.section(f"{family.name}, group", share) as section,
        tempfile.TemporaryDirectory(prefix="group-", dir=record.folder) as folder,
        _opened(settings, family, Path(folder)) as (cost, ways, timer),
    ):
        section.found["what"] = (
            f"{family.source}, random weights, on {settings.num_ranks} ranks: its menu, as a "
            "replica measures it when it starts"
        )
        section.found["group_cost"] = asdict(cost)
        section.table("menu, rows together").extend(
            {
                "degree": one.degree,
                "fixed_ms": 1e3 * one.cost.fixed_s,
                "per_megapixel_ms": 1e3 * one.cost.per_megapixel_s,
                "switch_ms": 1e3 * cost.switch_s,
            }
            for one in cost.costs
        )
        with record.section(f"{family.name}, steps by degree", 0.6 * share) as steps:
            measure_degrees(settings, family, ways, timer, steps)
        with record.section(f"{family.name}, changes of ranks", 0.3 * share) as changes:
            changes.found["what"] = "ms that a step takes longer after one on other ranks"
            for side in settings.group_px:
                if changes.left_s < _LEAST_S:
                    changes.leave_out(f"{side} px", "no time left")
                    continue
                widest = max(way.degree for way in ways)
                rows = switch_rows(timer, side, widest, settings.group_rounds)
                changes.table("changes").extend(rows)


@contextmanager
def _opened(
    settings: Settings, family: Family, folder: Path
) -> Iterator[tuple[GroupCost, Sequence[Way], GroupTimer]]:
    """Start a group of a model with random weights, and lend it."""
    # need pydantic, which a machine that only measures may not have
    from benchmarks.gpu.folders import save_whole
    from ray_cluster.config.sections.pools import DefaultsConfig, PoolConfig
    from ray_cluster.engine.groups.measuring import GroupTimer
    from ray_cluster.engine.models.loading import inspect_model
    from ray_cluster.replica.group.builder import open_group
    from ray_cluster.replica.group.processes import start_child
    from ray_cluster.replica.group.ranks import GroupRanks

    denoiser = family.build(settings.device, settings.dtype)
    save_whole(folder, family, is_tiny=settings.is_tiny, denoiser=denoiser)
    del denoiser
    # the first rank is on the same device
    free_memory(settings.device)
    pool = PoolConfig(
        name=family.name,
        model=str(folder),
        device=settings.device.type,
        num_gpus=1.0 if settings.device.type == "cuda" else 0.0,
        ranks=settings.num_ranks,
        max_px=max(settings.group_px),
        defaults=DefaultsConfig(size="{}x{}".format(*settings.default_px)),
    )
    ranks, news = GroupRanks(pool.model_dump_json(), pool.ranks, start_child), threading.Event()
    try:
        engine, model, _ = open_group(pool, inspect_model(pool), ranks, time.monotonic)
        ranks.call_when_news(news.set)
        yield engine.costs.current, engine.costs.ways, GroupTimer(model, ranks, news)
    finally:
        ranks.close()


def measure_degrees(
    settings: Settings, family: Family, ways: Sequence[Way], timer: GroupTimer, section: Section
) -> None:
    """Time every way of a step in turns, if all of them predict what one rank does."""
    section.found |= {"what": "one step as the head sees it, ms", "guided": family.is_guided}
    for index, side in enumerate(settings.group_px):
        limit_s = section.left_s / (len(settings.group_px) - index)
        if limit_s < _LEAST_S:
            section.leave_out(f"{side} px", "no time left")
            continue
        until_s = time.monotonic() + limit_s
        calls = {way: partial(_predicted, timer, side, way, family) for way in ways}
        other = _predicted(timer, side, ways[0], family, seed=1)
        _check(side, calls, other[1], _ALLOWED[settings.device.type], section)
        ms: dict[Way, list[float]] = {way: [] for way in ways}
        for number in range(settings.group_rounds):
            if number >= _FEWEST and time.monotonic() > until_s:
                break
            for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
                ms[way].append(1e3 * calls[way]()[0])
        section.table("steps by degree").extend(
            {"side_px": side, **asdict(way), "ms": summarise(taken)} for way, taken in ms.items()
        )


def _predicted(
    timer: GroupTimer, side: int, way: Way, family: Family, seed: int = 0
) -> tuple[float, Tensor]:
    """Return a step's seconds and prediction; the same latents for the same seed."""
    torch.manual_seed(seed)
    ways = [(way, range(way.degree))]
    [end] = timer.ends((side, side), ways, guided=family.is_guided)
    assert end.prediction is not None, "lost ranks are an error"
    return end.seconds, end.prediction


def _check(
    side: int,
    calls: Mapping[Way, Callable[[], tuple[float, Tensor]]],
    other: Tensor,
    allowed: float,
    section: Section,
) -> None:
    """Compare what every way predicts with the first one; other latents must give something else.

    Calling them warms them up for the size.
    """
    predictions = {way: call()[1] for way, call in calls.items()}
    truth = next(iter(predictions.values()))
    errors = {way: relative_error(found, truth) for way, found in predictions.items()}
    section.table("relative errors").extend(
        {"side_px": side, **asdict(way), "error": error, "allowed": allowed}
        for way, error in errors.items()
    )
    for way, error in errors.items():
        if not error <= allowed:
            section.fail(f"{side} px, {way}: off from one rank by {error:g}, allowed {allowed:g}")
    if not (control := relative_error(other, truth)) > allowed:
        section.fail(f"{side} px: other latents change the prediction by {control:g} only")
