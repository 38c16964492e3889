"""Whole images of several models: the production dispatch core, and replicas that batch them.

A table of whole images has the times of batches, not of steps. So an image is one step here, and
all are of one size; the linear cost that replicas report is a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.baselines.image_batches import InTimeBatches
from ray_cluster.policies.cascade import HeavyOutlook
from ray_cluster.policies.costs.cost_fit import fit_image_cost
from ray_cluster.policies.planning.cluster_state import BatchTimes, observe_batch
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import ImageRequest
from ray_cluster.simulator.cell.cell import UNLIMITED, profile_of
from ray_cluster.simulator.control.batch_replica import BatchDevice, BatchReplica, Callbacks
from ray_cluster.simulator.control.requests import SimulatedRequest
from ray_cluster.simulator.dispatcher import SimulatedDispatcher
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.replica import StepRun

# one megapixel, whatever it really is: tables of whole images know one size
_PX = 1000
_MEGAPIXELS = _PX * _PX / 1e6


class ServingEvents(Protocol):
    """Callbacks for what became of images."""

    def on_made(self, model: str, request: SimulatedRequest) -> None:
        """An image of the model is done."""

    def on_hopeless(self, request: SimulatedRequest) -> None:
        """There will be no image: it would be late, or too many replicas were lost."""


@dataclass(frozen=True, slots=True)
class ServedPool:
    """What is the same for all replicas of a pool.

    Attributes:
        extra_s: seconds that every batch takes beside its images, to score them.
        cost: as its replicas report it.
    """

    spec: PoolSpec
    extra_s: float
    cost: StepCost

    def batch_s(self, num_images: int) -> float:
        """Return the seconds of a batch."""
        return self.spec.batch_s(num_images) + self.extra_s

    def registration(self, replica_id: str) -> Registration:
        """Return a replica's registration; its batches may be capped lower."""
        most = max(one.batch for one in self.spec.options)
        return Registration(replica_id, profile_of(self.spec.model), most, most, self.cost)


class Serving:
    """Queues, leases and batches of all models of a fleet.

    Attributes:
        core: the dispatch core; read-only.

    Args:
        listener: called with what became of every image.
        seed: of the noise of devices.
        noise_cv: of the seconds of batches.
    """

    def __init__(
        self,
        fleet: Fleet,
        events: EventQueue,
        listener: ServingEvents,
        *,
        seed: int,
        noise_cv: float = 0.0,
    ) -> None:
        self._events = events
        self._listener = listener
        self._seed = seed
        self._noise_cv = noise_cv
        # an image is one step: it cannot be preempted
        config = DispatchConfig(preemption=False)
        self.core = DispatchCore(
            config=config,
            limits=UNLIMITED,
            epoch=1,
            configured={pool.model for pool in fleet.pools},
        )
        self._dispatcher = SimulatedDispatcher(
            self.core, events, on_outcome=self._on_outcome, timeout_s=config.replica_timeout_s
        )
        self._pools = {spec.name: served(spec, fleet) for spec in fleet.pools}
        self._caps = dict.fromkeys(self._pools, 1)
        self._pool_by_replica: dict[str, ServedPool] = {}
        self._live: dict[str, BatchReplica] = {}
        self._times = {name: BatchTimes() for name in self._pools}
        self._requests: dict[str, tuple[str, SimulatedRequest]] = {}
        self._views: dict[str, RequestView] = {}
        # as if every model had been served before, so that requests are queued, not refused
        for name, pool in self._pools.items():
            self.core.register(pool.registration(name), events.now_s)
            self.core.unregister(name, events.now_s)

    # requests

    def offer(self, model: str, request: SimulatedRequest, stage_index: int = 0) -> None:
        """Offer a stage of a request to one of the models."""
        request_id, now_s = _stage_id(str(request.number), stage_index), self._events.now_s
        image = ImageRequest(
            request_id=request_id,
            model=model,
            prompt="",
            width_px=_PX,
            height_px=_PX,
            num_steps=1,
            guidance_scale=1.0,
            sampler="ddim",
            seed=0,
            slo_s=request.deadline_s - now_s,
        )
        self._requests[request_id] = (model, request)
        self._views[request_id] = image.view(arrival_s=now_s, deadline_s=request.deadline_s)
        offer = self._dispatcher.offer([image])
        assert offer.accepted, offer.reason

    def _on_outcome(self, outcome: Outcome) -> None:
        del self._views[outcome.request_id]
        model, request = self._requests.pop(outcome.request_id)
        if isinstance(outcome, Completed):
            self._listener.on_made(model, request)
        else:
            self._listener.on_hopeless(request)

    def num_waiting(self, model: str) -> int:
        """Return how many images are in no batch yet."""
        return self.core.queue.waiting(model).num_requests

    def num_in_batches(self, model: str) -> int:
        """Return how many images are leased."""
        return sum(len(one.held) for one in self.core.replicas if one.model == model)

    @property
    def num_leased(self) -> int:
        """Images that are leased, of all models."""
        return sum(len(one.held) for one in self.core.replicas)

    def outlook(self, model: str) -> HeavyOutlook:
        """Return the queue before an image offered now, with the slowest pool's batches."""
        staying = list(self._staying(model))
        pools = {self._pool_by_replica[name].spec.name for name in staying}
        caps = [(self._pools[name], self._caps[name]) for name in pools]
        return HeavyOutlook(
            free_in_s=tuple(sorted(self.free_in_s(name) for name in staying)),
            num_ahead=self.num_waiting(model),
            max_batch=min((cap for _, cap in caps), default=1),
            batch_s=max((pool.batch_s(cap) for pool, cap in caps), default=0.0),
            alone_s=max((pool.batch_s(1) for pool, _ in caps), default=0.0),
        )

    def _staying(self, model: str) -> Iterator[str]:
        """Ids of the replicas that the core believes alive, except draining ones."""
        for record in self.core.replicas:
            if record.model == model:
                replica = self._live.get(record.replica_id)
                if replica is None or not replica.is_draining:
                    yield record.replica_id

    def free_in_s(self, replica_id: str) -> float:
        """Return the seconds until a replica's batch ends, by what it was leased and when."""
        held = self.core.replicas[replica_id].held.values()
        if not held:
            return 0.0
        batch_s = self._pool_by_replica[replica_id].batch_s(len(held))
        return max(0.0, max(one.leased_s for one in held) + batch_s - self._events.now_s)

    def is_making(self, replica_id: str) -> bool:
        """Whether a live replica holds anything."""
        return bool(self.core.replicas[replica_id].held)

    # replicas

    def set_cap(self, pool: str, max_batch: int) -> None:
        """Cap the batches of a pool from now on."""
        self._caps[pool] = max(1, max_batch)
        for name, replica in list(self._live.items()):
            if self._pool_by_replica[name].spec.name == pool:
                replica.set_cap(self._caps[pool])

    def bring_up(
        self,
        replica_id: str,
        pool: str,
        *,
        on_drained: Callable[[], None],
        watch: Callable[[str, StepRun], None] | None = None,
    ) -> None:
        """Start a replica that has loaded, under a new id."""
        kind = self._pools[pool]
        hardware = Hardware(kind.cost, noise_cv=self._noise_cv)
        replica = BatchReplica(
            kind.registration(replica_id),
            BatchDevice(hardware, [self._seed, *replica_id.encode()], kind.batch_s),
            InTimeBatches(kind.batch_s),
            self._events,
            view_of=self._views.__getitem__,
            callbacks=Callbacks(
                report=partial(self._dispatcher.report, replica_id),
                poll_anew=partial(self._dispatcher.poll_anew, replica_id),
                on_drained=partial(self._on_drained, replica_id, on_drained),
            ),
            cap=self._caps[pool],
            watch=partial(self._made, pool, watch),
        )
        self._pool_by_replica[replica_id] = kind
        self._live[replica_id] = replica
        self._dispatcher.register(replica)

    def _made(
        self, pool: str, watch: Callable[[str, StepRun], None] | None, replica_id: str, run: StepRun
    ) -> None:
        """A batch has ended."""
        expected_s = self._pools[pool].batch_s(len(run.request_ids))
        took_s = run.ends_s[-1] - run.start_s
        self._times[pool] = observe_batch(self._times[pool], took_s=took_s, expected_s=expected_s)
        if watch is not None:
            watch(replica_id, run)

    def spread(self, pool: str) -> float:
        """Return by how much the seconds of a pool's batches spread, over what they should be."""
        return self._times[pool].spread

    def drain(self, replica_id: str) -> None:
        """Let a replica end its batch and leave."""
        self._live[replica_id].drain()

    def _on_drained(self, replica_id: str, on_drained: Callable[[], None]) -> None:
        del self._live[replica_id]
        self._dispatcher.unregister(replica_id)
        on_drained()

    def fail(self, replica_id: str) -> None:
        """Lose a replica without notice; the core leases its requests anew once it finds out."""
        self._live.pop(replica_id).die()
        self._dispatcher.forget(replica_id)


def served(spec: PoolSpec, fleet: Fleet) -> ServedPool:
    """Return a pool with what its batches take, the scores included that it gives itself."""
    owners = [one.cascade for one in fleet.services if one.model == spec.model]
    scored_here = (one for one in owners if one and one.num_scorers is None)
    extra_s = max((one.discriminate_s for one in scored_here), default=0.0)
    options = [BatchOption(one.batch, one.seconds + extra_s) for one in spec.options]
    return ServedPool(spec, extra_s, fit_image_cost(options, _MEGAPIXELS))


def _stage_id(request_id: str, stage_index: int) -> str:
    """Return an id of one stage of a request: each is queued as a request of its own."""
    return request_id if stage_index == 0 else f"{request_id}.{stage_index}"
