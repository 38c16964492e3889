"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass

# GPUs of a group with sequence-parallel requests
GROUP_GPUS = 8


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """GPUs, and what is allocated to them.

    Attributes:
        cascades: services of two models in three pools.
        alone: services of one model in one pool.
    """

    gpus: int
    cascades: int
    alone: int

    @property
    def pools(self) -> int:
        """How many there are."""
        return 3 * self.cascades + self.alone


@dataclass(frozen=True, slots=True)
class CostSettings:
    """What is measured, and how often.

    Attributes:
        cells: one-GPU replicas, and requests that wait, of each cell whose dispatcher is timed.
        turns: of each cell; each is four decisions.
        crowds: GPUs and requests of the groups whose rounds are timed.
        rounds: groups of each sort.
        clusters: that are planned for.
        problems: allocations of each.
        controls: rounds of a cell's controller.
        hours: one-GPU replicas of each cell that is simulated.
        groups: numbers of groups that are simulated.
        hour_s: simulated seconds.
    """

    cells: tuple[tuple[int, int], ...] = (
        *((1, 10), (8, 100), (64, 1000), (256, 4000), (1024, 10_000)),
    )
    turns: int = 400
    crowds: tuple[tuple[int, int], ...] = (
        *((1, 64), (2, 64), (4, 64)),
        *((8, 8), (8, 16), (8, 32), (8, 64)),
    )
    rounds: int = 300
    clusters: tuple[ClusterSize, ...] = (
        ClusterSize(1, 0, 1),
        ClusterSize(8, 1, 1),
        ClusterSize(64, 2, 2),
        ClusterSize(256, 3, 3),
        ClusterSize(1024, 5, 5),
    )
    problems: int = 100
    controls: int = 300
    hours: tuple[int, ...] = (1, 8, 64, 256, 1024)
    groups: tuple[int, ...] = (1, 8, 32, 128)
    hour_s: float = 3600.0


def quick_costs() -> CostSettings:
    """Enough to see that everything works, in seconds."""
    return CostSettings(
        cells=((1, 4), (4, 20)),
        turns=5,
        crowds=((2, 4), (8, 6)),
        rounds=2,
        clusters=(ClusterSize(1, 0, 1), ClusterSize(16, 1, 1)),
        problems=2,
        controls=3,
        hours=(1, 4),
        groups=(1, 2),
        hour_s=60.0,
    )
