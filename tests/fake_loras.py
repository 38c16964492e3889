"""A registry of LoRAs in this process, for tests of what asks for one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray_cluster.protocol.loras import (
    MAX_LORAS_AT_ONCE,
    Lora,
    LoraAdded,
    LoraFacts,
    LoraLookup,
    LoraStatus,
)

ADDED_S = 1_750_000_000.0


def ready_lora(name: str = "pastel", base: str = "shapes", **changes: Any) -> LoraStatus:
    """A LoRA that is on one node and was used three times."""
    lora = Lora(f"id-{name}", name, base, f"builtin:{name}", added_s=ADDED_S)
    facts = LoraFacts("ab" * 32, num_bytes=2_500_000, ranks=(4, 8), num_layers=32)
    status = LoraStatus(lora, "ready", facts, num_uses=3, nodes=("node-1",))
    return replace(status, **changes)


class FakeLoras:
    """Registers LoRAs of any base, unless it is ``none``, up to a number.

    Attributes:
        num_calls: calls for LoRAs, of any kind.
        refusal: the answer to new ones; None registers them.
    """

    def __init__(self, max_loras: int = 20_000) -> None:
        self.num_calls = 0
        self.refusal: LoraAdded | None = None
        self._max_loras = max_loras
        self._by_name: dict[str, LoraStatus] = {}

    def put(self, *statuses: LoraStatus) -> None:
        self._by_name.update({one.lora.name: one for one in statuses})

    async def add_lora(self, lora: Lora) -> LoraAdded:
        self.num_calls += 1
        given = replace(lora, lora_id=f"id-{len(self._by_name)}", added_s=ADDED_S)
        there = self._by_name.get(lora.name)
        if there is not None:
            earlier = there.lora
            same = replace(
                given, lora_id=earlier.lora_id, added_s=earlier.added_s, owner=earlier.owner
            )
            is_same = there.lora == same and there.state != "removing"
            return LoraAdded(there, None if is_same else "exists")
        if lora.base == "none":
            return LoraAdded(None, "unknown_base")
        if len(self._by_name) >= self._max_loras:
            return LoraAdded(None, "too_many")
        if self.refusal is not None:
            return self.refusal
        self._by_name[lora.name] = LoraStatus(given, "registered")
        return LoraAdded(self._by_name[lora.name], is_new=True)

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        self.num_calls += 1
        names = sorted(name for name in self._by_name if name > after)
        most = min(limit, MAX_LORAS_AT_ONCE)
        return tuple(self._by_name[name] for name in names[:most])

    async def find_loras(self, names: Sequence[str]) -> LoraLookup:
        self.num_calls += 1
        found = {name: self._by_name[name] for name in names if name in self._by_name}
        near = {
            name: tuple(difflib.get_close_matches(name, self._by_name, n=3))
            for name in names
            if name not in found
        }
        return LoraLookup(found, near)

    async def remove_lora(self, name: str) -> LoraStatus | None:
        self.num_calls += 1
        status = self._by_name.pop(name, None)
        return None if status is None else replace(status, state="removing")
