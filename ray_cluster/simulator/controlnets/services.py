"""ControlNets on devices of their own: each has a queue, and batches what has arrived.

A device has several ControlNets, of which a model call is of one. The most urgent row that waits
decides which; no row waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from ray_cluster.policies.leasing.controlnet_peers import PeerView, choose_peer
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, FetchLink, Kept, Way
from ray_cluster.simulator.events import EventQueue, Timer


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Devices that run ControlNets alone.

    Attributes:
        cost: of a step of the base there, of which a ControlNet takes a share.
        add_ons: what ControlNets cost, with the way to them.
        max_batch: most rows of a model call.
    """

    num_devices: int
    cost: StepCost
    add_ons: AddOnCost
    max_batch: int

    @property
    def way(self) -> Way:
        """The way to them."""
        return self.add_ons.way or Way()


@dataclass(slots=True, eq=False)
class Ask:
    """The residuals of one ControlNet for one step of a request.

    Attributes:
        there_s: instant at which the device has the ControlNet; known when the ask has arrived.
        is_dropped: whether nobody needs them any more.
        took_s: from the ask to the answer; None while it is outstanding.
    """

    name: str
    view: RequestView
    asked_s: float
    on_answer: Callable[[], None]
    there_s: float = 0.0
    is_dropped: bool = False
    took_s: float | None = None


class ServiceDevice:
    """One device that runs ControlNets."""

    def __init__(self, device_id: str, spec: ServiceSpec, events: EventQueue) -> None:
        self.device_id = device_id
        self._spec = spec
        self._events = events
        self._kept, self._link = Kept(spec.add_ons.num_kept), FetchLink()
        self._waiting: list[Ask] = []
        # the end of what it computes, or the next instant at which something may begin
        self._timer: Timer | None = None
        self._is_busy = False
        # request and ControlNet of what it keeps
        self.kept_uses: set[tuple[str, str]] = set()
        self.num_outstanding = 0
        self.busy_s = 0.0

    def has(self, name: str) -> bool:
        """Whether a ControlNet is here, or on its way."""
        return name in self._kept

    @property
    def num_kept(self) -> int:
        """ControlNets that are here, or on their way."""
        return len(self._kept)

    def arrive(self, ask: Ask) -> None:
        """Compute a row when its turn comes."""
        now_s, fetch_s = self._events.now_s, self._spec.add_ons.controlnet_fetch_s
        ask.there_s = self._kept.there_s(ask.name, fetch_s, self._link, now_s)
        self._waiting.append(ask)
        if not self._is_busy:
            self._begin_at(now_s)

    def _begin_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.call_off()
        self._timer = self._events.at(at_s, self._begin)

    def _begin(self) -> None:
        """Compute the most urgent row whose ControlNet is there, and others with that one."""
        self._timer, now_s = None, self._events.now_s
        self._waiting = [one for one in self._waiting if not self._is_gone(one)]
        ready = [one for one in self._waiting if one.there_s <= now_s]
        if not ready:
            if self._waiting:
                self._begin_at(min(one.there_s for one in self._waiting))
            return
        ready.sort(key=lambda one: one.view.deadline_s)
        batch = [one for one in ready if one.name == ready[0].name][: self._spec.max_batch]
        self._waiting = [one for one in self._waiting if one not in batch]
        views = [one.view for one in batch]
        seconds = self._spec.add_ons.controlled_s(self._spec.cost, views)
        self.busy_s += seconds
        self._is_busy = True
        self._events.after(seconds, partial(self._end, batch))

    def _is_gone(self, ask: Ask) -> bool:
        if ask.is_dropped:
            self.num_outstanding -= 1
        return ask.is_dropped

    def _end(self, batch: Iterable[Ask]) -> None:
        self._is_busy = False
        for ask in batch:
            self._events.after(self._spec.way.transport_s / 2, partial(self._answer, ask))
        self._begin_at(self._events.now_s)

    def _answer(self, ask: Ask) -> None:
        self.num_outstanding -= 1
        if not ask.is_dropped:
            ask.took_s = self._events.now_s - ask.asked_s
            ask.on_answer()


@dataclass
class ControlNetServices:
    """All devices that run ControlNets; replicas of the base ask them."""

    spec: ServiceSpec
    events: EventQueue
    devices: list[ServiceDevice] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = [
            ServiceDevice(f"controlnets-{number}", self.spec, self.events)
            for number in range(self.spec.num_devices)
        ]

    def ask(self, name: str, view: RequestView, on_answer: Callable[[], None]) -> Ask:
        """Ask for the residuals of a step; the callback follows when they have arrived."""
        device = self._choose(name, view.request_id)
        device.kept_uses.add((view.request_id, name))
        device.num_outstanding += 1
        ask = Ask(name, view, self.events.now_s, on_answer)
        self.events.after(self.spec.way.transport_s / 2, partial(device.arrive, ask))
        return ask

    def forget(self, request_id: str, names: Iterable[str]) -> None:
        """A request with these ControlNets is not made any more."""
        for device in self.devices:
            device.kept_uses.difference_update((request_id, name) for name in names)

    def _choose(self, name: str, request_id: str) -> ServiceDevice:
        """Return a device that has the ControlNet and a place in its next batch, if there is one.

        A ControlNet thus has the more devices the more it is asked for. The first one that it gets
        is one of those with the fewest.
        """
        having = [one for one in self.devices if one.has(name)]
        free = [one for one in having if one.num_outstanding < self.spec.max_batch]
        if not having:
            fewest = min(one.num_kept for one in self.devices)
            free = [one for one in self.devices if one.num_kept == fewest]
        views = [
            PeerView(one.device_id, (request_id, name) in one.kept_uses, one.num_outstanding)
            for one in free or self.devices
        ]
        chosen = choose_peer(views)
        return next(one for one in self.devices if one.device_id == chosen)
