"""Figures of several policies on the same seeds: means, their intervals, and paired differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ray_cluster.simulator.intervals import Mean, mean_of, paired_difference


class ComparedRow(Protocol):
    """Figures of one policy on one seed."""

    @property
    def policy(self) -> str:
        """The policy's name."""

    @property
    def seed(self) -> int:
        """The seed."""


R = TypeVar("R", bound=ComparedRow)


@dataclass(frozen=True, slots=True)
class Comparison(Generic[R]):
    """Rows of several policies on the same seeds."""

    rows: tuple[R, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names in the order of the rows."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    def by_seed(self, policy: str, figure: str) -> dict[int, float]:
        """Return a figure of a policy, an attribute of the rows, by seed."""
        return {row.seed: float(getattr(row, figure)) for row in self.rows if row.policy == policy}

    def estimates(self, figure: str) -> dict[str, Mean]:
        """Return the mean of a figure over the seeds, by policy."""
        return {
            policy: mean_of(list(self.by_seed(policy, figure).values())) for policy in self.policies
        }

    def differences(self, figure: str) -> dict[str, Mean]:
        """Return the first policy's less each other's, seed by seed.

        Raises:
            ValueError: the seeds differ.
        """
        first, *others = self.policies
        mine, found = self.by_seed(first, figure), dict[str, Mean]()
        for policy in others:
            theirs = self.by_seed(policy, figure)
            if mine.keys() != theirs.keys():
                raise ValueError(f"not the same seeds: {sorted(mine)} and {sorted(theirs)}")
            seeds = sorted(mine)
            found[policy] = paired_difference(
                [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]
            )
        return found
