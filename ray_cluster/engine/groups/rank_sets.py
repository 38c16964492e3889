"""Sets of ranks that a step may run on, as process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ray_cluster.policies.sequence_parallel.sets import aligned_sets


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """The sets that a rank belongs to.

    Attributes:
        rank: of this process.
        groups: of its sets of several ranks.
    """

    rank: int
    groups: dict[range, dist.ProcessGroup]

    @classmethod
    def build(
        cls, rank: int, num_ranks: int, degrees: Sequence[int], device: torch.device
    ) -> RankSets:
        """Make all sets, and warm up those that a rank belongs to.

        All ranks call this alike, once ``torch.distributed`` is initialised: each set is made by
        all of them in one order. None is ever destroyed: the same set again would hang.
        """
        groups = {}
        for ranks in aligned_sets(num_ranks, [degree for degree in degrees if degree > 1]):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                assert group is not None, "it is a member"
                groups[ranks] = group
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        return cls(rank, groups)
