"""A store of LoRAs for tests of the dispatcher: it says what it is to say, and fetches nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import Poll, PollReply
from ray_cluster.protocol.loras import Lora, LoraFacts, LoraOrder, LoraReport
from ray_cluster.replica.lora_store.lists import OrderList, ReportList
from ray_cluster.replica.lora_store.skill import store_registration
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.fakes import image_request, registration

FACTS = LoraFacts("ab" * 32, 1_000_000, (8,), 12)
CONFIG = DispatchConfig(default_slo_s=30.0, poll_s=1.0, replica_timeout_s=6.0, max_attempts=3)


def lora(name: str, **values: Any) -> Lora:
    return replace(Lora(f"id-{name}", name, "m", f"builtin:{name}"), **values)


def with_loras(request_id: str, *names: str, **values: Any) -> ImageRequest:
    uses = tuple(LoraUse(name, 1.0, f"id-{name}") for name in names)
    return replace(image_request(request_id, **values), add_ons=AddOns(loras=uses))


def ready(name: str, took_s: float = 2.0) -> LoraReport:
    return LoraReport(f"id-{name}", "ready", FACTS, took_s=took_s)


def failed(name: str, failure: str, attempt: int = 0) -> LoraReport:
    report = LoraReport(f"id-{name}", "failed", reason="no such file", attempt=attempt)
    return replace(report, failure=failure)  # type: ignore[arg-type]


def bare_core(max_queued_images: int = 8) -> DispatchCore:
    limits = LimitsConfig(max_queued_images=max_queued_images)
    core = DispatchCore(config=CONFIG, limits=limits, epoch=1, configured=("m",))
    core.register(replace(registration(), arguments='{"model": "folder-of-m"}'), 0.0)
    for name in ("pastel", "outline"):
        core.loras.add(lora(name))
    return core


class FakeStore:
    """Registers with a core, and keeps both lists as a store does.

    Attributes:
        core: may be exchanged, as by a restart; then register again.
        said: its reports, by id.
    """

    def __init__(self, core: DispatchCore, name: str, node: str, *, now_s: float = 0.0) -> None:
        self.core = core
        self.name = name
        self._node = node
        self._orders = OrderList()
        self._reports = ReportList()
        self.said: dict[str, LoraReport] = {}
        self._epoch = 0
        self.register(now_s)

    def register(self, now_s: float = 0.0) -> None:
        registration = store_registration(self.name, self._node)
        self._epoch = self.core.register(registration, now_s)
        self._orders.begin()
        self._reports.begin()

    @property
    def orders(self) -> dict[str, LoraOrder]:
        return self._orders.by_id

    @property
    def ready(self) -> set[str]:
        return set(self._reports.ready)

    def poll(self, *, now_s: float = 0.0) -> PollReply:
        """Poll once, and apply the answer."""
        reply = self.core.poll(self.make_poll(), now_s)
        self.apply(reply)
        return reply

    def make_poll(self) -> Poll:
        return Poll(
            self.name, self._epoch, 0, loras=self._reports.news(), lora_mark=self._orders.mark
        )

    def apply(self, reply: PollReply) -> None:
        if reply.lora_mark is not None:
            self._reports.note_heard(reply.lora_mark)
        if reply.loras is not None:
            self._orders.apply(reply.loras)

    def say(self, *reports: LoraReport) -> None:
        """Have these and no others."""
        said = {one.lora_id: one for one in reports}
        for lora_id in self.said.keys() - said.keys():
            self._reports.drop(lora_id)
        for lora_id, report in said.items():
            if self.said.get(lora_id) != report:
                self._reports.put(report)
        self.said = said

    def tell(self, *reports: LoraReport, now_s: float = 0.0) -> list[str]:
        """Say that it has these and no others; return the names of what it is to have."""
        self.say(*reports)
        self.poll(now_s=now_s)
        return [one.lora.name for one in self.orders.values()]
