"""What each of several processes may take of a GPU, and whether all of them fit on it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.policies.costs.number_formats import Capability

MIB = 1 << 20
# what a process takes of a GPU beside its tensors: the CUDA context, and the kernels and handles of
# torch, cuBLAS and cuDNN. Between 0.3 and 0.6 GiB, by card and driver
CUDA_CONTEXT_BYTES = 600 * MIB
# of shares of a GPU: those of three replicas with 0.3333 each add up to one
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, as far as a plan depends on it.

    Attributes:
        free_bytes: what no other process has; the context of the one that plans counts as free.
    """

    total_bytes: int
    free_bytes: int
    capability: Capability


def replica_bytes(card: Card, num_gpus: float, memory_bytes: int | None) -> int:
    """Return what one replica may take of a card in all, its CUDA context included.

    Args:
        num_gpus: the part of the card that is reserved for it.
        memory_bytes: its own limit, which outranks its part.
    """
    part = int(card.total_bytes * min(num_gpus, 1.0))
    return min(part if memory_bytes is None else memory_bytes, card.total_bytes)


def tensor_fraction(card: Card, limit_bytes: int) -> float:
    """Return the part of a card that the tensors of a replica with such a limit may take."""
    return max(0, limit_bytes - CUDA_CONTEXT_BYTES) / card.total_bytes


@dataclass(frozen=True, slots=True)
class GpuTenants:
    """Replicas of one pool that may share GPUs with others.

    Attributes:
        num_gpus: the part of a GPU that is reserved for each.
        limit_bytes: what each may take of it.
        count: replicas of the pool.
    """

    pool: str
    num_gpus: float
    limit_bytes: int
    count: int


def fullest_card(tenants: Sequence[GpuTenants]) -> dict[str, int]:
    """Return how many replicas of each pool are on the GPU whose replicas may take the most.

    Which of them Ray puts together is not known: it may be any that fit by their parts.
    """
    return dict(_fullest(tenants, 1.0)[1])


def _fullest(tenants: Sequence[GpuTenants], left: float) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return the bytes and the counts by pool of the worst set in what is left of a GPU."""
    if not tenants:
        return 0, ()
    first, *others = tenants
    most = min(first.count, int((left + _ROUNDING) / first.num_gpus))
    found = []
    for count in range(most + 1):
        bytes_of_others, counts = _fullest(others, left - count * first.num_gpus)
        total_bytes = count * first.limit_bytes + bytes_of_others
        found.append((total_bytes, ((first.pool, count), *counts)))
    return max(found)
