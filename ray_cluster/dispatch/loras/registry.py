"""The registered LoRAs of a cell, by name and by id, and what is known of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.dispatch.loras.names import NearNames
from ray_cluster.protocol.loras import MAX_LORAS_AT_ONCE, Lora, LoraAdded, LoraFacts, LoraReport


@dataclass(slots=True)
class KnownLora:
    """A registered LoRA.

    Attributes:
        num_open: requests with it that have not ended.
        attempt: of its order; greater after a failure that may not happen again.
        failure: the report of that, while it holds.
        ordered_s: instant since which a store is to have it; None while none is.
        ready: nodes of the stores that have it, by store.
        failed: reports of the present attempt, by store.
    """

    lora: Lora
    facts: LoraFacts | None = None
    num_uses: int = 0
    num_open: int = 0
    attempt: int = 0
    failure: LoraReport | None = None
    ordered_s: float | None = None
    is_removed: bool = False
    ready: dict[str, str] = field(default_factory=dict)
    failed: dict[str, LoraReport] = field(default_factory=dict)

    @property
    def is_wanted(self) -> bool:
        """Whether stores are to have it."""
        return self.num_open > 0 or (self.lora.is_pinned and not self.is_removed)

    def forget_no_room(self) -> None:
        """Forget the failures that were for want of room: for one that is needed there will be."""
        self.failed = {
            name: report for name, report in self.failed.items() if not report.is_for_want_of_room
        }
        if self.failure is not None and self.failure.is_for_want_of_room:
            self.failure = None

    def lacks(self, store_id: str) -> bool:
        """Whether a store has yet to get it, as far as it says."""
        return store_id not in self.ready and store_id not in self.failed


class LoraRegistry:
    """Gives each name to one LoRA, and keeps removed ones while requests use them.

    A registration is reserved, then written by the caller, then kept: nobody else sees it before.

    Attributes:
        limits: how many there may be.
        keeps_removed: whether removed ones stay, as not all open requests are known yet.
    """

    def __init__(self) -> None:
        self.limits = LorasConfig()
        self.keeps_removed = False
        self._by_id: dict[str, KnownLora] = {}
        self._by_name: dict[str, KnownLora] = {}
        self._names: list[str] = []
        self._near = NearNames()
        self._reserved: dict[str, Lora] = {}
        self._num_of: Counter[str] = Counter()
        self._num_pinned_of: Counter[str] = Counter()
        self._gone: list[str] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[KnownLora]:
        return iter(self._by_id.values())

    def get(self, lora_id: str) -> KnownLora | None:
        """Return a LoRA by its id, removed or not."""
        return self._by_id.get(lora_id)

    def named(self, name: str) -> KnownLora | None:
        """Return the LoRA that has a name now."""
        return self._by_name.get(name)

    def restore(self, lora: Lora, facts: LoraFacts | None, *, is_removed: bool) -> KnownLora:
        """Know a LoRA that an earlier dispatcher has registered, and perhaps removed since.

        However many there may be by now, and though its name may have been given again. Of two
        that have one name, the later one keeps it: writing the earlier one had failed in part.
        """
        other = self._by_name.get(lora.name)
        if other is not None and not is_removed:
            if other.lora.added_s > lora.added_s:
                is_removed = True
            else:
                self._give_up_name(other)
        known = KnownLora(lora, facts, is_removed=is_removed)
        self._put(known)
        return known

    def reserve(self, lora: Lora) -> LoraAdded | None:
        """Count a LoRA that is about to be kept; return why it may not be, or None.

        Callers do so for one LoRA of a name at a time.
        """
        if (refused := self._refusal(lora)) is not None:
            return refused
        assert lora.name not in self._by_name, f"{lora.name} is there"
        self._reserved[lora.lora_id] = lora
        self._count(lora, 1)
        return None

    def release(self, lora: Lora) -> None:
        """Count a reserved one no more."""
        if self._reserved.pop(lora.lora_id, None) is not None:
            self._count(lora, -1)

    def keep(self, lora: Lora) -> KnownLora:
        """Know a LoRA that was reserved."""
        self.release(lora)
        known = KnownLora(lora)
        self._put(known)
        return known

    def _put(self, known: KnownLora) -> None:
        lora = known.lora
        self._by_id[lora.lora_id] = known
        if not known.is_removed:
            self._by_name[lora.name] = known
            insort(self._names, lora.name)
            self._near.add(lora.name)
            self._count(lora, 1)

    def remove(self, lora_id: str) -> KnownLora | None:
        """Take a LoRA's name away; None if it has none any more."""
        known = self._by_id.get(lora_id)
        if known is None or known.is_removed:
            return None
        self._give_up_name(known)
        return known

    def _give_up_name(self, known: KnownLora) -> None:
        name = known.lora.name
        known.is_removed = True
        del self._by_name[name]
        del self._names[bisect_left(self._names, name)]
        self._near.remove(name)
        self._count(known.lora, -1)

    def forget_unused(self, known: KnownLora) -> bool:
        """Forget a removed LoRA that no open request uses; return whether it was one."""
        is_used = self.keeps_removed or known.num_open > 0
        if not known.is_removed or is_used or known.lora.lora_id not in self._by_id:
            return False
        del self._by_id[known.lora.lora_id]
        self._gone.append(known.lora.lora_id)
        return True

    def take_gone(self) -> list[str]:
        """Return the ids that were forgotten since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def page(self, after: str, limit: int) -> Iterator[KnownLora]:
        """Yield LoRAs by name, those after a name, some at a time."""
        first = bisect_right(self._names, after)
        names = islice(self._names, first, first + min(limit, MAX_LORAS_AT_ONCE))
        return (self._by_name[name] for name in names)

    def near(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return names that look like the first of some that there are not; others have none."""
        given = iter(names)
        found = {one: self._near.near(one) for one in islice(given, 1)}
        return found | dict.fromkeys(given, ())

    def _count(self, lora: Lora, by: int) -> None:
        for counter in [self._num_of] + [self._num_pinned_of] * lora.is_pinned:
            counter[lora.owner] += by
            if not counter[lora.owner]:
                del counter[lora.owner]

    def _refusal(self, lora: Lora) -> LoraAdded | None:
        limits, num, num_pinned = self.limits, self._num_of, self._num_pinned_of
        if len(self._by_name) + len(self._reserved) >= limits.max_loras:
            return LoraAdded(None, "too_many", f"{limits.max_loras}")
        if lora.is_pinned and num_pinned.total() >= limits.max_pinned:
            return LoraAdded(None, "too_many_pinned", f"{limits.max_pinned}")
        if not lora.owner:
            # of the settings: who writes these sets the limits
            return None
        if num[lora.owner] >= limits.share_of(limits.max_loras):
            return LoraAdded(None, "too_many_own", f"{limits.share_of(limits.max_loras)}")
        if lora.is_pinned and num_pinned[lora.owner] >= limits.share_of(limits.max_pinned):
            return LoraAdded(None, "too_many_own_pinned", f"{limits.share_of(limits.max_pinned)}")
        return None


def is_same(one: Lora, other: Lora) -> bool:
    """Whether two registrations say the same, whoever made them and when."""
    return replace(other, lora_id=one.lora_id, added_s=one.added_s, owner=one.owner) == one
