"""A simulated cluster behind the control loop's protocol: a cell, and GPUs for its replicas.

Every decision is a plan's or a policy's: which images are deferred, how large batches are, how many
replicas there are. A table of whole images has the times of batches, not of steps: so an image is
one step here, and all are of one size; the linear cost that replicas report is a fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.baselines.image_batches import FixedBatches, InTimeBatches
from ray_cluster.policies.costs.cost_fit import fit_image_cost
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.planning.cluster_state import (
    BatchTimes,
    ClusterState,
    ModelState,
    PoolState,
    ServiceState,
    observe_batch,
)
from ray_cluster.policies.planning.fleet import CascadeSpec, Fleet, PoolSpec
from ray_cluster.policies.planning.plan import PlannedSettings
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.cell import cell
from ray_cluster.simulator.cell.cell import SCORER, CellSpec, Fate, SimulatedCell
from ray_cluster.simulator.cell.runs import times
from ray_cluster.simulator.control.scaling import Faults, Scaling
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.workload import Arrival

# one megapixel, whatever it really is: tables of whole images know one size
_PX = 1000
_MEGAPIXELS = _PX * _PX / 1e6
# decimals of a spread that is reported: smaller changes alter no plan
_DIGITS = 2
# images that are scored at once where that takes no time
_MANY = 100_000
STEPS = 20
"""Of the images of cascades: reports of them tell the dispatcher when the heavy model is free."""
Watch = Callable[[str, StepRun], None]


def whole_image(
    arrival_s: float,
    service: str,
    slo_s: float,
    *,
    num_steps: int = 1,
    confidence: float = 1.0,
    coin: float = 0.0,
) -> Arrival:
    """Return a request for a whole image of a service; of a cascade it has `STEPS`."""
    return Arrival(
        *(arrival_s, service, _PX, _PX, num_steps),
        uses_guidance=False,
        slo_s=slo_s,
        slo_class=service,
        confidence=confidence,
        coin=coin,
    )


def options_of(
    profile: LatencyProfile,
    steps: int | None = None,
    side_px: int = 0,
    *,
    batching_gain: float = 1.0,
) -> tuple[BatchOption, ...]:
    """Return batches of images, of a table of whole images of one size or of steps.

    Args:
        steps: of square images of `side_px`; None for whole images.
        batching_gain: factor on what a batch saves against single images; larger batches never end
            sooner, however large it is.

    Raises:
        ValueError: the table has other images, or none.
    """
    what, size_px = "whole images of one size", (side_px, side_px)
    rows = list(profile.of("image"))
    if steps is not None:
        what, rows = f"steps of {side_px} px", list(profile.of("step"))
        rows = [
            one
            for one in rows
            if (one.key.width_px, one.key.height_px) == size_px and not one.key.beside
        ]
    seconds = {one.key.batch: (steps or 1) * one.seconds for one in rows}
    if not seconds:
        raise ValueError(
            f"given {profile.name!r}, which has no {what}; allowed: profiles that have some, or, "
            "of steps, a workload that says how many `steps` of which `side_px`"
        )
    if min(seconds) != 1 or len(seconds) < len(rows):
        raise ValueError(
            f"given {profile.name!r}, whose batches of {what} are "
            f"{sorted(one.key.batch for one in rows)}; allowed: profiles that have each batch "
            "once, from 1"
        )
    changed, least_s = list[BatchOption](), 0.0
    for batch, batch_s in sorted(seconds.items()):
        alone_s = batch * seconds[1]
        least_s = max(alone_s - batching_gain * (alone_s - batch_s), least_s)
        changed.append(BatchOption(batch, least_s))
    return tuple(changed)


class SimulatedCluster:
    """Services and cascades on a virtual clock.

    Attributes:
        cell: that serves; read-only.
        fates: of all requests that have ended.

    Args:
        events: the clock.
        fleet: pools and services.
        num_gpus: of every type.
        rng: of failures, loads and noise.
        noise_cv: of the seconds of batches and loads, lognormal.
        faults: of GPUs; None for none.
        dwell_s: age below which a replica counts as young.
        watch: called after every batch.
    """

    def __init__(
        self,
        events: EventQueue,
        fleet: Fleet,
        num_gpus: dict[str, int],
        rng: np.random.Generator,
        *,
        noise_cv: float = 0.0,
        faults: Faults | None = None,
        dwell_s: float = 0.0,
        watch: Watch | None = None,
    ) -> None:
        self._events, self._fleet, self._dwell_s, self._watch = events, fleet, dwell_s, watch
        spec = _cell_of(fleet, seed=int(rng.integers(2**32)), noise_cv=noise_cv)
        self._pools = {pool.name: pool for pool in spec.pools}
        self._times = dict.fromkeys(self._pools, BatchTimes())
        self.cell = SimulatedCell(spec, self._note_batch, events=events, on_end=self._note_end)
        self._scaling = Scaling(
            self.cell, self._pools, fleet, num_gpus, rng, noise_cv=noise_cv, faults=faults
        )
        self._version = -1
        self._num_offered = 0
        self._num_arrived: dict[str, int] = defaultdict(int)
        self._num_missed: dict[str, int] = defaultdict(int)
        self._num_scored: dict[str, int] = {}
        self.fates: list[Fate] = []
        self.cell.start()

    # the control loop's protocol

    def observe(self) -> ClusterState:
        """Return the state, with the confidences since the last call."""
        models = dict.fromkeys(pool.model for pool in self._fleet.pools)
        views = {one.name: one for one in self.cell.core.cascades.views()}
        services = []
        for name in (spec.name for spec in self._fleet.services):
            view, confidences = views.get(name), tuple[float, ...]()
            if view is not None:
                confidences = view.confidences_since(self._num_scored.get(name, 0))
                self._num_scored[name] = view.num_scored
            services.append(
                ServiceState(
                    name,
                    self._num_arrived[name],
                    num_missed=self._num_missed[name],
                    confidences=confidences,
                )
            )
        return ClusterState(
            now_s=self._events.now_s,
            devices=self._scaling.devices(),
            pools=tuple(self._pool(spec.name) for spec in self._fleet.pools),
            models=tuple(map(self._model, models)),
            services=tuple(services),
        )

    def _pool(self, name: str) -> PoolState:
        staying = self._scaling.staying(name)
        return PoolState(
            name,
            num_ready=sum(one.is_ready for one in staying),
            num_loading=sum(not one.is_ready for one in staying),
            num_young=sum(one.started_s > self._events.now_s - self._dwell_s for one in staying),
            spread=round(self._times[name].spread, _DIGITS),
        )

    def _model(self, name: str) -> ModelState:
        core = self.cell.core
        num_in_batches = sum(len(one.held) for one in core.replicas if one.model == name)
        return ModelState(name, core.queue.waiting(name).num_requests, num_in_batches)

    def scale(self, pool: str, num_replicas: int) -> None:
        self._scaling.scale(pool, num_replicas)

    def apply(self, settings: PlannedSettings) -> None:
        """Apply batch caps and thresholds at once; a version that is not later is ignored."""
        if settings.version <= self._version:
            return
        self._version = settings.version
        for pool, max_batch in settings.max_batches:
            self.cell.set_cap(pool, max_batch)
        self.cell.apply(settings.cascades)

    @property
    def gpu_hours(self) -> float:
        return self._scaling.gpu_hours

    def offer(self, request: Arrival) -> None:
        self._num_arrived[request.slo_class] += 1
        self.cell.arrive(f"{self._num_offered}", request)
        self._num_offered += 1

    def _note_batch(self, replica_id: str, run: StepRun) -> None:
        pool = self._scaling.pool_of(replica_id)
        if pool is not None:
            batch_s = self._pools[pool].hardware.batch_s
            assert batch_s is not None
            self._times[pool] = observe_batch(
                self._times[pool],
                took_s=run.ends_s[-1] - run.start_s,
                expected_s=batch_s(len(run.request_ids)),
            )
            if self._watch is not None:
                self._watch(replica_id, run)

    def _note_end(self, _: str, fate: Fate) -> None:
        self._num_missed[fate.arrival.slo_class] += not fate.is_met
        self.fates.append(fate)


def _cell_of(fleet: Fleet, *, seed: int, noise_cv: float) -> CellSpec:
    """Return the cell: pools without replicas so far, and all that score."""
    cascades = {one.name: (one.model, one.cascade) for one in fleet.services if one.cascade}
    pools = [_planned(spec, fleet, noise_cv) for spec in fleet.pools]
    pools += [_scorers(cascade) for _, cascade in cascades.values()]
    routes = {name: (light, cascade.heavy_model) for name, (light, cascade) in cascades.items()}
    return CellSpec(tuple(pools), seed=seed, cascades=routes)


def _planned(spec: PoolSpec, fleet: Fleet, noise_cv: float) -> cell.PoolSpec:
    """Return a pool; its batches include the scores that it gives its images itself."""
    owners = [one.cascade for one in fleet.services if one.model == spec.model]
    scored_here = (one for one in owners if one and one.num_scorers is None)
    extra_s = max((one.discriminate_s for one in scored_here), default=0.0)
    options = [BatchOption(one.batch, one.seconds + extra_s) for one in spec.options]
    num_steps = STEPS if any(one.cascade for one in fleet.services) else 1
    cost = times(fit_image_cost(options, _MEGAPIXELS), 1 / num_steps)
    most = max(one.batch for one in spec.options)

    def batch_s(num_images: int) -> float:
        return spec.batch_s(num_images) + extra_s

    hardware = Hardware(cost, noise_cv=noise_cv, batch_s=batch_s)
    return cell.PoolSpec(
        *(spec.name, spec.model, 0, hardware, most, most), policy=InTimeBatches(batch_s), cap=1
    )


def _scorers(cascade: CascadeSpec) -> cell.PoolSpec:
    """Return replicas that score one image each at a time, or what scores all at once."""
    num, score_s = cascade.num_scorers, cascade.discriminate_s
    most, seconds = (1, score_s) if num else (_MANY, 0.0)
    hardware = Hardware(StepCost(0.0, 0.0), batch_s=lambda _: seconds)
    return cell.PoolSpec(
        *(SCORER, SCORER, num or 1, hardware, most, most), policy=FixedBatches(most), kind="score"
    )
