"""What calls ask for, as the controller counts it: in images of a model's default size and steps.

Accepted requests count in full. A client owes those of its requests that are cancelled or fail,
unless their replicas died, and its next ones count only for what they ask beyond that; so a burst
that is sent and cancelled over and over counts once. What nobody has read yet is taken back
instead. Of requests that were refused for want of capacity, a client's count no faster than its
share of what the model's replicas could make, were there as many as there may be, and it owes less
at the same pace. So a flood of calls that are not made moves a plan no further than an honest
client's calls would.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ray_cluster.config.sections.pools import DefaultsConfig, PoolConfig
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.records import Counted, RequestRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.policies.admission.fluid import PoolView
from ray_cluster.policies.admission.load import load_of, load_s
from ray_cluster.policies.types import RequestView
from ray_cluster.protocol.controller import TypicalRequest
from ray_cluster.protocol.leases import lane_of
from ray_cluster.requests import ImageRequest, ModelProfile

# seconds of its share that a client's unmet requests may come in at once
_BURST_S = 10.0
# a client shares in what may be counted for so long after its last request
_RECENT_S = 60.0
# clients that are told apart; beyond them, the one that has been silent longest is forgotten
_MOST_CLIENTS = 1000


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model's replicas can make.

    Attributes:
        pool: the live replicas, or the last ones.
        typical: a request that names nothing but a prompt.
        most_replicas: that there may be.
    """

    pool: PoolView
    typical: TypicalRequest
    most_replicas: int

    def images(self, view: RequestView) -> float:
        """Return how many typical images take as long as a request."""
        cost = self.pool.shared_cost
        typical_s = load_s(cost, load_of(self.typical.view))
        return load_s(cost, load_of(view)) / typical_s if typical_s > 0 else 1.0

    def replica_s(self, view: RequestView) -> float:
        """Return the seconds that one replica needs for a request in full batches."""
        return self.pool.num_replicas * load_s(self.pool.shared_cost, load_of(view))


@dataclass(slots=True)
class _Client:
    """What is known of a client at an instant.

    Attributes:
        level_s: unmet work that was counted lately, in replica seconds.
        owed_s: accepted work that was counted and not made, in replica seconds.
    """

    at_s: float
    level_s: float = 0.0
    owed_s: float = 0.0

    def leak(self, share_per_s: float, now_s: float) -> None:
        """Forget a client's share of what can be made since."""
        leaked_s = share_per_s * max(0.0, now_s - self.at_s)
        self.level_s = max(0.0, self.level_s - leaked_s)
        self.owed_s = max(0.0, self.owed_s - leaked_s)
        self.at_s = max(self.at_s, now_s)


def _no_counts() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class DemandCounts:
    """Counts since the dispatcher started; from one reading to the next they never fall.

    Attributes:
        accepted: images by the cascade that routes them, or else the model that makes them; and
            denoising steps that ask for a ControlNet, by its lane.
        unmet: images that were refused for want of capacity, as far as they count.
    """

    accepted: defaultdict[str, float] = field(default_factory=_no_counts)
    unmet: defaultdict[str, float] = field(default_factory=_no_counts)

    def copy(self) -> DemandCounts:
        return DemandCounts(self.accepted.copy(), self.unmet.copy())


class Capacities:
    """Knows what the replicas of each model can make."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._pools: Sequence[PoolConfig] = ()

    def apply(self, settings: Settings) -> None:
        """Apply other settings: bounds on replicas, and what calls leave out."""
        self._pools = settings.pools

    def of(self, model: str) -> Capacity | None:
        """Return that of a model; None if it never had a replica."""
        pool, profile = self._replicas.pool(model), self._replicas.profiles.get(model)
        if pool is None or profile is None:
            return None
        tunings = [one for one in self._pools if one.model_name == model]
        bounds = [one.max_replicas for one in tunings]
        known = [one for one in bounds if one is not None]
        # without a bound, twice as many as there are, and one
        num_live = len(self._replicas.ids(model))
        most = sum(known) if known and len(known) == len(bounds) else 2 * num_live + 1
        typical = typical_request(tunings[0] if tunings else None, profile)
        return Capacity(pool, typical, max(1, most))


class Demand:
    """Counts what requests ask for, a client's share of what is unmet at most."""

    def __init__(self, capacities: Capacities) -> None:
        self._counts = DemandCounts()
        self._reading = 0
        self._capacities = capacities
        self._clients: dict[str, OrderedDict[str, _Client]] = {}
        self._seen_s = 0.0

    def read(self) -> DemandCounts:
        """Return what was counted until now."""
        self._reading += 1
        return self._counts.copy()

    def note_accepted(
        self, request: ImageRequest, view: RequestView, client: str, now_s: float
    ) -> Counted:
        """Count a request that will be made, beyond what its client owes."""
        service, capacity = service_of(request), self._capacities.of(view.model)
        known = self._client(service, client, capacity, now_s)
        work_s = 0.0 if capacity is None else capacity.replica_s(view)
        paid_s = min(known.owed_s, work_s)
        known.owed_s -= paid_s
        part = 1 - paid_s / work_s if work_s else 1.0
        images, steps = part * _images(request, view, capacity), part * view.num_steps
        self._add(request, images, steps)
        return Counted(self._reading, images, steps, work_s - paid_s, paid_s)

    def _add(self, request: ImageRequest, images: float, steps: float) -> None:
        self._counts.accepted[service_of(request)] += images
        for use in request.add_ons.controls:
            self._counts.accepted[lane_of("control", use.name)] += steps
        for kind, name in request.last_stages.items():
            self._counts.accepted[lane_of(kind, name)] += images

    def note_unmade(self, record: RequestRecord) -> None:
        """Have a client owe what is not made of an accepted request."""
        request, view, counted = record.request, record.view, record.counted
        if counted is None:
            return
        capacity = self._capacities.of(view.model)
        known = self._client(service_of(request), record.client, capacity, self._seen_s)
        left = view.remaining_steps / view.num_steps
        known.owed_s += left * counted.paid_s
        if counted.reading == self._reading:
            self._add(request, -left * counted.images, -left * counted.steps)
        else:
            known.owed_s += left * counted.work_s

    def note_unmet(
        self,
        requests: Sequence[ImageRequest],
        views: Sequence[RequestView],
        client: str,
        now_s: float,
    ) -> None:
        """Count requests that more replicas could have made, as far as the client's share goes."""
        capacity = self._capacities.of(views[0].model) if views else None
        if capacity is None:
            return
        service = service_of(requests[0])
        known = self._client(service, client, capacity, now_s)
        most_s = _BURST_S * capacity.most_replicas / len(self._clients[service])
        for request, view in zip(requests, views, strict=True):
            work_s = capacity.replica_s(view)
            counted_s = min(work_s, max(0.0, most_s - known.level_s))
            if counted_s <= 0:
                return
            known.level_s += counted_s
            self._counts.unmet[service] += counted_s / work_s * _images(request, view, capacity)

    def _client(
        self, service: str, client: str, capacity: Capacity | None, now_s: float
    ) -> _Client:
        """Return what is known of a client, and forget those that have been silent for long."""
        self._seen_s = max(self._seen_s, now_s)
        clients = self._clients.setdefault(service, OrderedDict())
        found = clients.pop(client, None) or _Client(now_s)
        while clients:
            oldest = next(iter(clients.values()))
            if len(clients) < _MOST_CLIENTS and now_s < oldest.at_s + _RECENT_S:
                break
            clients.popitem(last=False)
        clients[client] = found
        found.leak(0.0 if capacity is None else capacity.most_replicas / len(clients), now_s)
        return found


def service_of(request: ImageRequest) -> str:
    """Return what a request is demand for: the cascade that routes it, or else its model."""
    return request.called_model if request.is_routed else request.model


def _images(request: ImageRequest, view: RequestView, capacity: Capacity | None) -> float:
    """Return what a request counts for; one that a cascade routes is one image of both models."""
    return 1.0 if capacity is None or request.is_routed else capacity.images(view)


def typical_request(tuning: PoolConfig | None, profile: ModelProfile) -> TypicalRequest:
    """Return a request that names nothing but a prompt.

    Args:
        tuning: settings of a pool of the model; None for one that is not in them.
    """
    given = DefaultsConfig() if tuning is None else tuning.defaults
    width_px, height_px = profile.default_width_px, profile.default_height_px
    if given.size is not None:
        width_px, height_px = map(int, given.size.split("x"))
    scale = given.guidance_scale
    scale = profile.default_guidance_scale if scale is None else scale
    return TypicalRequest(
        width_px,
        height_px,
        given.num_inference_steps or profile.default_num_steps,
        uses_guidance=profile.guidance in {"rows", "empty"} and scale > 1,
    )
