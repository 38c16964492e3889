"""ControlNets on devices of their own, and what replicas of the base ask them for.

A device has a queue, and batches what has arrived; a model call is of one ControlNet, that of the
most urgent row, and no row waits for others. As in the live engine
(:mod:`ray_cluster.engine.controlnets.source`) a row asks once for each step; the step goes on
without a row whose answer is late, and that row sits out until it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ray_cluster.policies.leasing.controlnet_peers import PeerView, choose_peer, patience_s
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, FetchLink, Kept, Way
from ray_cluster.simulator.events import EventQueue, Timer

# of the mean of what answers take, as live replicas have it
_NEWEST_SHARE = 0.2


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
    """One device that runs ControlNets.

    Attributes:
        kept: that are here, or on their way.
        kept_uses: request and ControlNet of what it keeps.
    """

    def __init__(self, device_id: str, spec: ServiceSpec, events: EventQueue) -> None:
        self.device_id = device_id
        self._spec = spec
        self._events = events
        self.kept, self._link = Kept(spec.add_ons.num_kept), FetchLink()
        self._waiting: list[Ask] = []
        # the end of what it computes, or the next instant at which something may begin
        self._timer: Timer | None = None
        self._is_busy = False
        self.kept_uses: set[tuple[str, str]] = set()
        self.num_outstanding = 0
        self.busy_s = 0.0

    def arrive(self, ask: Ask) -> None:
        """Compute a row when its turn comes."""
        now_s, fetch_s = self._events.now_s, self._spec.add_ons.controlnet_fetch_s
        ask.there_s = self.kept.there_s(ask.name, fetch_s, self._link, now_s)
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
        self.num_outstanding -= sum(one.is_dropped for one in self._waiting)
        self._waiting = [one for one in self._waiting if not one.is_dropped]
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
        having = [one for one in self.devices if name in one.kept]
        free = [one for one in having if one.num_outstanding < self.spec.max_batch]
        if not having:
            fewest = min(len(one.kept) for one in self.devices)
            free = [one for one in self.devices if len(one.kept) == fewest]
        views = [
            PeerView(one.device_id, (request_id, name) in one.kept_uses, one.num_outstanding)
            for one in free or self.devices
        ]
        chosen = choose_peer(views)
        return next(one for one in self.devices if one.device_id == chosen)


class ControlNetRows:
    """The rows of a replica that wait for residuals, or have them.

    Args:
        services: who computes them.
        on_answer: called when one of them has arrived.
    """

    def __init__(self, services: ControlNetServices, on_answer: Callable[[], None]) -> None:
        self._services = services
        self._on_answer = on_answer
        self._asked: dict[str, tuple[Ask, ...]] = {}
        self._usual_s: dict[str, float] = {}

    @property
    def half_share(self) -> float:
        """The part of a step before residuals are needed."""
        return self._services.spec.way.half_share

    def is_ready(self, request_id: str) -> bool:
        """Whether nothing is outstanding that a row has waited for."""
        return all(ask.took_s is not None for ask in self._asked.get(request_id, ()))

    def ask(self, views: Iterable[RequestView]) -> None:
        """Ask for what the rows of a step need and have not been given yet."""
        for view in views:
            if view.controls and view.request_id not in self._asked:
                self._asked[view.request_id] = tuple(
                    self._services.ask(name, view, self._on_answer) for name in view.controls
                )

    def patience_s(self, views: Sequence[RequestView]) -> float:
        """Return the seconds after which a step goes on without the rows whose answer is late."""
        names = {name for view in views for name in view.controls}
        usual_s = max((self._usual_s.get(name, 0.0) for name in names), default=0.0)
        return patience_s(usual_s, all_wait=all(view.controls for view in views))

    def took_step(self, request_id: str) -> None:
        """A row has taken its step: what was asked for has served."""
        for ask in self._asked.pop(request_id, ()):
            assert ask.took_s is not None
            usual_s = self._usual_s.get(ask.name, ask.took_s)
            self._usual_s[ask.name] = usual_s + _NEWEST_SHARE * (ask.took_s - usual_s)

    def drop(self, view: RequestView) -> None:
        for ask in self._asked.pop(view.request_id, ()):
            ask.is_dropped = True
        self._services.forget(view.request_id, view.controls)
