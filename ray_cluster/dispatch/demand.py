"""What calls ask for, as the controller counts it: in images of a model's default size and steps.

Accepted requests count in full; what their clients cancel is taken back. Of those that were refused
for want of capacity, or cancelled before they were made, a client's count no faster than its share
of what the model's replicas could make, were there as many as there may be. So a flood of refused
calls moves a plan no further than an honest client's calls would.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ray_cluster.config.pools import DefaultsConfig
from ray_cluster.config.settings import PoolSettings, Settings
from ray_cluster.dispatch.replicas import Replicas
from ray_cluster.policies.fluid import PoolView
from ray_cluster.policies.load import load_of, load_s
from ray_cluster.policies.types import RequestView
from ray_cluster.protocol.control import TypicalRequest
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
    """Unmet work that was counted of a client lately, in replica seconds, at an instant."""

    at_s: float
    level_s: float = 0.0


def _no_counts() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class DemandCounts:
    """Counts since the dispatcher started; they fall only by what is cancelled.

    Attributes:
        accepted: images by the cascade that routes them, or else the model that makes them; and
            denoising steps that ask for a ControlNet, by its lane.
        unmet: images that were refused for want of capacity, or cancelled, as far as they count.
    """

    accepted: defaultdict[str, float] = field(default_factory=_no_counts)
    unmet: defaultdict[str, float] = field(default_factory=_no_counts)

    def copy(self) -> DemandCounts:
        return DemandCounts(self.accepted.copy(), self.unmet.copy())


class Capacities:
    """Knows what the replicas of each model can make."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._pools: Sequence[PoolSettings] = ()

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
        self.counts = DemandCounts()
        self._capacities = capacities
        self._clients: dict[str, OrderedDict[str, _Client]] = {}
        self._seen_s = 0.0

    def note_accepted(
        self, request: ImageRequest, view: RequestView, client: str, now_s: float
    ) -> None:
        """Count a request that will be made."""
        service = service_of(request)
        self._client(service, client, now_s)
        self._add(request, _images(request, view, self._capacities.of(view.model)), view.num_steps)

    def _add(self, request: ImageRequest, images: float, steps: int) -> None:
        self.counts.accepted[service_of(request)] += images
        for use in request.add_ons.controls:
            self.counts.accepted[lane_of("control", use.name)] += steps

    def note_cancelled(self, request: ImageRequest, view: RequestView, client: str) -> None:
        """Take back what is not made of an accepted request; its client may have waited too long.

        Args:
            view: with the steps that are done.
        """
        whole = _images(request, replace(view, steps_done=0), self._capacities.of(view.model))
        left = view.remaining_steps / view.num_steps
        self._add(request, -left * whole, -view.remaining_steps)
        self.note_unmet([request], [view], client, self._seen_s)

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
        known, clients = self._client(service, client, now_s), self._clients[service]
        share_per_s = capacity.most_replicas / len(clients)
        known.level_s = max(0.0, known.level_s - share_per_s * (now_s - known.at_s))
        known.at_s = now_s
        for request, view in zip(requests, views, strict=True):
            work_s = capacity.replica_s(view)
            if known.level_s and known.level_s + work_s > share_per_s * _BURST_S:
                return
            known.level_s += work_s
            self.counts.unmet[service] += _images(request, view, capacity)

    def _client(self, service: str, client: str, now_s: float) -> _Client:
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
        return found


def service_of(request: ImageRequest) -> str:
    """Return what a request is demand for: the cascade that routes it, or else its model."""
    return request.model if request.light is None else request.called_model


def _images(request: ImageRequest, view: RequestView, capacity: Capacity | None) -> float:
    """Return what a request counts for; one that a cascade routes is one image of both models."""
    return 1.0 if capacity is None or request.light is not None else capacity.images(view)


def typical_request(tuning: PoolSettings | None, profile: ModelProfile) -> TypicalRequest:
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
        uses_guidance=profile.guidance == "rows" and scale > 1,
    )
