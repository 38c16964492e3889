"""The LoRAs of a cell: which there are, which stores have them, and what requests wait for.

A request whose LoRAs no store has yet waits in the dispatcher, not in a replica's place, while the
stores fetch them (SwiftDiffusion, section 4.2, fetches beside the first steps instead, so that an
image depends on how long that takes; here only those that are to begin without do, for steps that
the call and the settings tell). Without a live store nothing is held back, except at the
start, while the first one is expected: replicas fetch for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.dispatch.loras.registry import KnownLora, LoraRegistry, is_same
from ray_cluster.dispatch.loras.stores import LoraStores
from ray_cluster.protocol.calling.changes import Mark
from ray_cluster.protocol.loras import (
    Lora,
    LoraAdded,
    LoraFacts,
    LoraLookup,
    LoraOrder,
    LoraOrders,
    LoraReports,
    LoraState,
    LoraStatus,
)
from ray_cluster.requests import Failure, ImageRequest

# seconds that a LoRA is expected to take while none was fetched
_FIRST_FETCH_S = 5.0
# weight of the latest one in what further ones are expected to take
_LATEST_SHARE = 0.3


class Loras:
    """Knows the LoRAs of a cell; decides nothing.

    Args:
        base_model_of: returns what pools of a model call their model.
    """

    def __init__(self, base_model_of: Callable[[str], str]) -> None:
        self._base_model_of = base_model_of
        self._base_models: dict[str, str] = {}
        self._registry = LoraRegistry()
        self._stores = LoraStores(self._registry, self._order)
        self._expected_until_s: float | None = None
        self._found: dict[str, LoraFacts] = {}
        self._took_s = _FIRST_FETCH_S
        self._bytes_per_s: float | None = None

    def __len__(self) -> int:
        return len(self._registry)

    # the registry

    def apply(self, limits: LorasConfig) -> None:
        """Apply other limits; what is registered stays."""
        self._registry.limits = limits

    def restore(self, lora: Lora, facts: LoraFacts | None, *, is_removed: bool) -> None:
        """See :meth:`LoraRegistry.restore`."""
        self._know(self._registry.restore(lora, facts, is_removed=is_removed))

    def find(self, lora: Lora) -> LoraAdded | None:
        """Return the answer to a registration whose name is taken; None if it is free."""
        known = self._registry.named(lora.name)
        if known is None:
            return None
        return LoraAdded(self._status(known), None if is_same(known.lora, lora) else "exists")

    def reserve(self, lora: Lora) -> LoraAdded | None:
        """See :meth:`LoraRegistry.reserve`."""
        return self._registry.reserve(lora)

    def release(self, lora: Lora) -> None:
        """See :meth:`LoraRegistry.release`."""
        self._registry.release(lora)

    def keep(self, lora: Lora) -> LoraAdded:
        """Offer a LoRA that was reserved, and is written."""
        known = self._registry.keep(lora)
        self._know(known)
        return LoraAdded(self._status(known), is_new=True)

    def add(self, lora: Lora) -> LoraAdded:
        """Register a LoRA, unless its name is taken; the same one again is no error."""
        return self.find(lora) or self.reserve(lora) or self.keep(lora)

    def _know(self, known: KnownLora) -> None:
        self._stores.note_known(known)
        if known.is_wanted:
            self._note_change(known)

    def id_of(self, name: str) -> str | None:
        """Return the id of the LoRA that has a name now."""
        known = self._registry.named(name)
        return None if known is None else known.lora.lora_id

    def remove(self, lora_id: str) -> LoraStatus | None:
        """Offer a LoRA no more, and forget it once no open request uses it.

        None if it is offered no more already.
        """
        known = self._registry.remove(lora_id)
        if known is None:
            return None
        status = self._status(known)
        if known.lora.is_pinned:
            self._note_change(known)
        self._forget_unused(known)
        return status

    def _forget_unused(self, known: KnownLora) -> None:
        if self._registry.forget_unused(known):
            self._stores.note_removed(known)

    def keep_removed(self) -> None:
        """Forget no removed LoRA before :meth:`drop_removed`."""
        self._registry.keeps_removed = True

    def drop_removed(self) -> None:
        """Forget removed LoRAs that no open request uses, once the open ones are known."""
        self._registry.keeps_removed = False
        for known in list(self._registry):
            self._forget_unused(known)

    def take_gone(self) -> list[str]:
        """Return the ids that were forgotten since the last call."""
        return self._registry.take_gone()

    def take_found(self) -> dict[str, LoraFacts]:
        """Return what was found out of LoRAs since the last call, by id."""
        found, self._found = self._found, {}
        return found

    def page(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        """Return LoRAs by name, those after a name; at most ``MAX_LORAS_AT_ONCE``."""
        return tuple(self._status(known) for known in self._registry.page(after, limit))

    def lookup(self, names: Iterable[str]) -> LoraLookup:
        """Return the LoRAs of these names; for the first that there is not, names like it."""
        given = list(dict.fromkeys(names))
        named = {one: known for one in given if (known := self._registry.named(one)) is not None}
        near = self._registry.near(one for one in given if one not in named)
        return LoraLookup({name: self._status(known) for name, known in named.items()}, near)

    def _status(self, known: KnownLora) -> LoraStatus:
        failure = known.failure
        return LoraStatus(
            lora=known.lora,
            state=self._state(known),
            facts=known.facts,
            reason="" if failure is None else failure.reason,
            is_permanent=failure is not None and failure.failure == "invalid",
            num_uses=known.num_uses,
            nodes=tuple(sorted(set(known.ready.values()))),
        )

    def _state(self, known: KnownLora) -> LoraState:
        if known.is_removed:
            return "removing"
        if known.ready:
            return "ready"
        if known.failure is not None:
            return "failed"
        return "fetching" if known.is_wanted and self._stores else "registered"

    # requests

    def note_open(self, request: ImageRequest) -> None:
        """Count an accepted request; what it needs is ordered from now on."""
        for known in self._of(request):
            known.num_open += 1
            known.num_uses += 1
            known.forget_no_room()
            # also where only some stores could not get it, and had no reason to try again
            is_first = known.num_open == 1
            failures = [known.failure, *(known.failed.values() if is_first else ())]
            is_again = any(one is not None and one.failure == "unreachable" for one in failures)
            if is_again:
                self._begin_anew(known)
            if is_again or is_first:
                self._note_change(known)

    def note_end(self, request: ImageRequest) -> None:
        """Count a request no more."""
        for known in self._of(request):
            known.num_open -= 1
            if not known.num_open:
                self._note_change(known)
            self._forget_unused(known)

    def holds_back(self, request: ImageRequest, steps_done: int = 0) -> bool:
        """Whether a request has to wait until a store has what its next step needs."""
        if self._unknown(request) is not None:
            return True
        if steps_done < request.add_ons.lora_start_step:
            return False
        if not self._stores and self._expected_until_s is None:
            return False
        return any(not known.ready for known in self._of(request))

    def failure(self, request: ImageRequest) -> Failure | None:
        """Return how a request ends that waits for what is not to be had; None if it may be."""
        name = request.request_id
        if (unknown := self._unknown(request)) is not None:
            message = f"the LoRA {unknown!r} was removed"
            return Failure(name, "invalid", message, "lora", "loras", code="lora_failed")
        for known in self._of(request):
            report = known.failure
            if report is None or known.ready:
                continue
            message = f"the LoRA {known.lora.name!r} cannot be had: {report.reason}"
            if report.failure == "invalid":
                return Failure(name, "invalid", message, "lora", "loras", code="lora_failed")
            return Failure(name, "error", message, "lora")
        return None

    def fetch_s(self, requests: Sequence[ImageRequest], now_s: float) -> float:
        """Return the seconds that requests will probably wait for their LoRAs.

        Nothing for those that begin without: what is left to wait after these steps is not known.
        """
        if not self._stores:
            return 0.0
        missing = {
            known.lora.lora_id: known
            for request in requests
            if not request.add_ons.lora_start_step
            for known in self._of(request)
            if not known.ready
        }
        # several are fetched at the same time
        return max((self._left_s(known, now_s) for known in missing.values()), default=0.0)

    def _left_s(self, known: KnownLora, now_s: float) -> float:
        whole_s = self._took_s
        if known.facts is not None and self._bytes_per_s is not None:
            whole_s = known.facts.num_bytes / self._bytes_per_s
        return whole_s if known.ordered_s is None else max(0.0, whole_s - now_s + known.ordered_s)

    def orders_of(self, request: ImageRequest) -> tuple[LoraOrder, ...]:
        """Return what a replica needs to know of a request's LoRAs."""
        return tuple(self._order(known) for known in self._of(request))

    def _unknown(self, request: ImageRequest) -> str | None:
        """Return the name of a LoRA that was removed between the call's check and its admission."""
        uses = request.add_ons.loras
        gone = (one.name for one in uses if one.lora_id and self._registry.get(one.lora_id) is None)
        return next(gone, None)

    def _of(self, request: ImageRequest) -> list[KnownLora]:
        found = (self._registry.get(use.lora_id) for use in request.add_ons.loras)
        return [known for known in found if known is not None]

    # stores

    def expect_stores(self, until_s: float) -> None:
        """Hold requests back although no store lives yet: one will, or at that instant not."""
        self._expected_until_s = until_s

    def gives_up(self, now_s: float) -> bool:
        """Whether stores are expected no more from now on."""
        if self._expected_until_s is None or now_s < self._expected_until_s:
            return False
        self._expected_until_s = None
        return True

    @property
    def store_ids(self) -> Collection[str]:
        """The live stores."""
        return self._stores.ids

    def join(self, store_id: str, node: str) -> None:
        """Note a store, of which nothing is known yet."""
        self._expected_until_s = None
        self._stores.join(store_id, node)

    def leave(self, store_id: str) -> None:
        """Forget a store."""
        self._stores.leave(store_id)

    def hear(self, store_id: str, said: LoraReports) -> Mark:
        """Note what has changed of what a store has; return how far that is known."""
        for report in self._stores.hear(store_id, said):
            known = self._registry.get(report.lora_id)
            if known is None or report.facts is None:
                continue
            if report.facts != known.facts:
                known.facts = self._found[report.lora_id] = report.facts
            if report.took_s:
                self._note_fetch(report.took_s, report.facts.num_bytes)
        return self._stores.mark(store_id)

    def _note_fetch(self, took_s: float, num_bytes: int) -> None:
        self._took_s += _LATEST_SHARE * (took_s - self._took_s)
        rate = num_bytes / took_s
        known = self._bytes_per_s
        self._bytes_per_s = rate if known is None else known + _LATEST_SHARE * (rate - known)

    def note_applied(self, store_id: str, mark: Mark) -> None:
        """Note how far a store says that it has applied its orders."""
        self._stores.note_applied(store_id, mark)

    def orders(self, store_id: str, now_s: float) -> LoraOrders | None:
        """Return what has changed of a store's orders; None if there is nothing it must know."""
        return self._stores.orders(store_id, now_s)

    def take_alerted(self) -> set[str]:
        """Return the stores that are to be answered at once, since the last call."""
        return self._stores.take_alerted()

    def note_base(self, base: str) -> None:
        """Order the LoRAs of a model again if its pool calls its model otherwise by now."""
        model = self._base_model_of(base)
        if self._base_models.get(base, "") == model:
            return
        self._base_models[base] = model
        for known in [one for one in self._stores.wanted if one.lora.base == base]:
            if not known.ready:
                self._begin_anew(known)
            self._note_change(known)

    def _begin_anew(self, known: KnownLora) -> None:
        """Have stores forget that they could not get a LoRA."""
        known.attempt += 1
        known.failure = None
        known.failed.clear()

    def _note_change(self, known: KnownLora) -> None:
        if not known.is_wanted:
            known.ordered_s = None
        self._stores.note_change(known)

    def _order(self, known: KnownLora) -> LoraOrder:
        base_model = self._base_model_of(known.lora.base)
        return LoraOrder(known.lora, base_model, known.attempt, is_needed=known.num_open > 0)
