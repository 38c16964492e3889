"""GPUs of a run by what they do, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise

from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.fleet import Fleet
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.reports import Bar, Timeline

BROKEN = "broken"


def gpu_timeline(
    course: Course, fleet: Fleet, num_gpus: Mapping[str, int], *, title: str
) -> Timeline:
    """Return how many GPUs each pool has over time.

    The loop sees numbers, not which GPU is whose: a row is the first, second, ... GPU of its type,
    counted from the pool that the fleet names first.

    Args:
        course: of the run.
        fleet: pools and types of GPUs.
        num_gpus: of each type, broken ones too.
        title: of the drawing.
    """
    uses = [list(_uses(state, fleet, num_gpus)) for state in course.states]
    ends_s = [state.now_s for state in course.states]
    # the last round lasts as long as the one before it
    ends_s.append(2 * ends_s[-1] - ends_s[-2] if len(ends_s) > 1 else ends_s[-1])
    spans = list(pairwise(ends_s))
    rows = [
        f"{device.device} {number + 1}"
        for device in fleet.devices
        for number in range(num_gpus[device.device])
    ]
    bars = [
        bar for row in range(len(rows)) for bar in _bars(row, [one[row] for one in uses], spans)
    ]
    labels = [label for pool in fleet.pools for label in (pool.name, _loads(pool.name))]
    shown = {bar.label for bar in bars}
    return Timeline(
        "timeline", title, rows, [one for one in (*labels, BROKEN) if one in shown], bars
    )


def _uses(state: ClusterState, fleet: Fleet, num_gpus: Mapping[str, int]) -> Iterator[str | None]:
    """What every GPU does, type after type; None if it is free or about to be."""
    for device in fleet.devices:
        num = num_gpus[device.device]
        used = [
            label
            for pool in fleet.pools
            if pool.device == device.device
            for label, replicas in (
                (pool.name, state.pool(pool.name).num_ready),
                (_loads(pool.name), state.pool(pool.name).num_loading),
            )
            for _ in range(replicas * pool.gpus_per_replica)
        ]
        num_working = state.num_gpus(device.device)
        free = [None] * (num_working - len(used))
        yield from [*used, *free, *[BROKEN] * (num - num_working)]


def _bars(row: int, uses: list[str | None], spans: list[tuple[float, float]]) -> Iterator[Bar]:
    """Of one GPU; as long as it does the same it is one bar."""
    for label, group in groupby(zip(uses, spans, strict=True), key=lambda one: one[0]):
        held = [span for _, span in group]
        if label is not None:
            yield Bar(row, held[0][0], held[-1][1], label)


def _loads(pool: str) -> str:
    return f"{pool} loads"
