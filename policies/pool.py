"""All replicas of a model seen as one server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ray_cluster.policies.load import Amounts, prices_s
from ray_cluster.policies.types import ReplicaView, StepCost


@dataclass(frozen=True, slots=True)
class PoolView:
    """The replicas of one model together.

    Attributes:
        num_replicas: how many there are.
        num_slots: requests that they step at once.
        max_batch: of the replica that steps most of them.
        shared_cost: one request's part of the cost when all replicas run full batches. Exact where
            the replicas' terms are in proportion, a little optimistic otherwise (a parallel sum is
            superadditive).
        slowest_cost: each term of the replica that is slowest in it.
        starts_in_s: seconds until one of them lives, where none does now.
        shared_prices_s: of ``shared_cost``, as :func:`ray_cluster.policies.load.prices_s` has them.
        slowest_prices_s: of ``slowest_cost``, likewise.
    """

    num_replicas: int
    num_slots: int
    max_batch: int
    shared_cost: StepCost
    slowest_cost: StepCost
    starts_in_s: float = 0.0
    shared_prices_s: Amounts = field(init=False, repr=False, compare=False)
    slowest_prices_s: Amounts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # a pool lives long, and every prediction asks for these
        object.__setattr__(self, "shared_prices_s", prices_s(self.shared_cost))
        object.__setattr__(self, "slowest_prices_s", prices_s(self.slowest_cost))


def pool_of(replicas: Sequence[ReplicaView]) -> PoolView:
    """Return the view of replicas of one model, of which there is at least one."""
    costs = [one.step_cost for one in replicas]
    slowest = slowest_cost(costs)
    return PoolView(
        num_replicas=len(replicas),
        num_slots=sum(one.max_batch for one in replicas),
        max_batch=max(one.max_batch for one in replicas),
        shared_cost=replace(
            # the worst shares of add-ons and masks are kept
            slowest,
            # as share_cost does, for all at once
            fixed_s=_parallel([one.step_cost.fixed_s / one.max_batch for one in replicas]),
            per_megapixel_s=_parallel([cost.per_megapixel_s for cost in costs]),
            decode_per_megapixel_s=_parallel([cost.decode_per_megapixel_s for cost in costs]),
            per_squared_megapixel_s=_parallel([cost.per_squared_megapixel_s for cost in costs]),
        ),
        slowest_cost=slowest,
    )


def slowest_cost(costs: Sequence[StepCost]) -> StepCost:
    """Return each term of the replica that is slowest in it, for batches of one size."""
    return StepCost(
        fixed_s=max(cost.fixed_s for cost in costs),
        per_megapixel_s=max(cost.per_megapixel_s for cost in costs),
        decode_per_megapixel_s=max(cost.decode_per_megapixel_s for cost in costs),
        per_squared_megapixel_s=max(cost.per_squared_megapixel_s for cost in costs),
        source="modelled",
        control_share=max(cost.control_share for cost in costs),
        lora_share=max(cost.lora_share for cost in costs),
        spared_share=min(cost.spared_share for cost in costs),
    )


def _parallel(terms_s: Sequence[float]) -> float:
    """Seconds per unit of work of servers that share the work by their speeds."""
    if min(terms_s) <= 0:
        return 0.0
    return 1 / sum(1 / term_s for term_s in terms_s)
