"""Which LoRAs a node keeps when there is not room for all, and which fetches may begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ray_cluster.models.sources.lora_sources import origin_of
from ray_cluster.protocol.loras import LoraOrder

# fetches at once: of all sources, and of one place that may hang
_AT_ONCE, _AT_ONCE_OF_ONE = 16, 4
# of the disk; the rest is for what requests need
_PINNED_SHARE = 0.5


def kept_ids(
    orders: Collection[LoraOrder], num_bytes: Mapping[str, int], max_bytes: int
) -> set[str]:
    """Return the ids of what is to be on a node's disk.

    All that requests need, and pinned LoRAs on half of the disk, which those who pinned them share.

    Args:
        num_bytes: of those whose size is known, by id.
    """
    kept = {one.lora.lora_id for one in orders if one.is_needed}
    room = _PINNED_SHARE * max_bytes
    for order in _in_turns([one for one in orders if not one.is_needed], num_bytes):
        size = num_bytes.get(order.lora.lora_id, 0)
        # of unknown size: it may fit
        if room > 0 and size <= room:
            kept.add(order.lora.lora_id)
            room -= size
    return kept


def _in_turns(pinned: Iterable[LoraOrder], num_bytes: Mapping[str, int]) -> list[LoraOrder]:
    """Return pinned LoRAs so that those of each owner take up as much, the oldest of them first."""
    by_age = sorted(pinned, key=lambda one: (one.lora.added_s, one.lora.lora_id))
    of_owner: Counter[str] = Counter()
    taken = {}
    for one in by_age:
        of_owner[one.lora.owner] += num_bytes.get(one.lora.lora_id, 0)
        taken[one.lora.lora_id] = of_owner[one.lora.owner]
    return sorted(by_age, key=lambda one: taken[one.lora.lora_id])


class FetchSlots:
    """Which fetches run.

    One client's sources, however slow, leave the others some slots: it gets at most half of those
    that are free, and likewise of those for one place. LoRAs of the settings have no such bound.
    """

    def __init__(self) -> None:
        self._origin_of: dict[str, str] = {}
        self._owner_of: dict[str, str] = {}

    def __contains__(self, lora_id: str) -> bool:
        return lora_id in self._origin_of

    @property
    def are_full(self) -> bool:
        """Whether none is free."""
        return len(self._origin_of) >= _AT_ONCE

    def take(self, order: LoraOrder) -> bool:
        """Take a slot for a fetch, if there is one for it."""
        lora_id, owner = order.lora.lora_id, order.lora.owner
        origin = origin_of(order.lora.source)
        there = [one for one, at in self._origin_of.items() if at == origin]
        num_free = _AT_ONCE - len(self._origin_of)
        num_free_there = _AT_ONCE_OF_ONE - len(there)
        own = [one for one, whose in self._owner_of.items() if whose == owner]
        own_there = [one for one in there if self._owner_of[one] == owner]
        is_hogging = owner and (len(own) >= num_free or len(own_there) >= num_free_there)
        if num_free <= 0 or num_free_there <= 0 or is_hogging:
            return False
        self._origin_of[lora_id], self._owner_of[lora_id] = origin, owner
        return True

    def release(self, lora_id: str) -> None:
        """Free the slot of a fetch that has ended."""
        del self._origin_of[lora_id], self._owner_of[lora_id]
