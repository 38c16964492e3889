"""What a step costs at each degree, measured at the start and learnt from every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.groups.ranks import GuidanceRows
from ray_cluster.policies.costs.cost_model import work_of
from ray_cluster.policies.types import DegreeCost, GroupCost, RequestView, StepCost


@dataclass(frozen=True, slots=True)
class Way:
    """How a step may be taken.

    Attributes:
        degree: ranks of its set.
    """

    degree: int
    rows: GuidanceRows = "together"


class DegreeCosts:
    """The cost of a step in every way; the step thread observes, any thread may read.

    Args:
        ways: that the model can be run in; each degree together, at least.
        group: what is known beside the costs.
    """

    def __init__(
        self, ways: Sequence[Way], group: GroupCost, clock: Callable[[], float] | None = None
    ) -> None:
        self._costs = {way: StepCosts(clock=clock) for way in ways}
        self._group = group

    @property
    def ways(self) -> tuple[Way, ...]:
        """In which the model can be run."""
        return tuple(self._costs)

    def begin(self, measured: Mapping[Way, StepCost], switch_s: float) -> None:
        """Begin from costs that were measured; before the first step."""
        for way, cost in measured.items():
            self._costs[way].begin(cost)
        self._group = replace(self._group, switch_s=switch_s)

    @property
    def current(self) -> GroupCost:
        """What steps cost at present."""
        return replace(
            self._group,
            costs=tuple(
                DegreeCost(way.degree, costs.current, self._apart(way.degree))
                for way, costs in self._costs.items()
                if way.rows == "together"
            ),
        )

    def _apart(self, degree: int) -> StepCost | None:
        costs = self._costs.get(Way(degree, "apart"))
        return None if costs is None else costs.current

    def observe(self, request: RequestView, way: Way, seconds: float) -> None:
        """Take in how long a step of a request took."""
        self._costs[way].observe(work_of([request]), seconds)
