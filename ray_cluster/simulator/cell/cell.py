"""A simulated cell: arrivals, replicas of several pools, and the production dispatch core.

Refused, dropped, failed and late requests all count as missed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.fidelity import Terms
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepPolicy
from ray_cluster.policies.types import RequestView, StepCost, WhenLate
from ray_cluster.protocol.leases import Registration, ReplicaEvent, Returned
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, ImageRequest, ModelProfile
from ray_cluster.simulator.controlnets.services import ControlNetServices, ServiceSpec
from ray_cluster.simulator.dispatcher import SimulatedDispatcher
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Device, Hardware
from ray_cluster.simulator.replica import SimulatedReplica, StepRun
from ray_cluster.simulator.workload import Arrival

# a deadline that never matters
_FAR_S = 1e7
# only policies refuse requests here, no limit
UNLIMITED = LimitsConfig(max_queued_images=10**7, max_queue_s=_FAR_S)
_NO_MAP = BlobRef("", 0)

End = Literal["finished", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of an arrival.

    Attributes:
        end_s: instant of the end.
        num_steps: with how many it was made.
        attempts: leases it took.
        predicted_s: seconds from the arrival to the end, as predicted at admission.
    """

    arrival: Arrival
    end: End
    end_s: float
    num_steps: int = 0
    attempts: int = 0
    predicted_s: float = 0.0

    @property
    def is_met(self) -> bool:
        """Whether it was finished in time, with no fewer steps than its client accepts."""
        arrival = self.arrival
        is_whole = self.num_steps >= (arrival.fewest_steps or arrival.num_steps)
        in_time = self.end_s <= arrival.arrival_s + arrival.slo_s
        return self.end == "finished" and is_whole and in_time


@dataclass(slots=True)
class CellResult:
    """How a simulation went.

    Attributes:
        fates: one per arrival, in the workload's order.
        busy_s_by_replica: seconds in which each device worked.
        end_s: instant of the last end.
        totals: number of requests by end.
    """

    fates: list[Fate]
    busy_s_by_replica: dict[str, float]
    end_s: float
    totals: Counter[End]

    @property
    def attainment(self) -> float:
        """Share of all arrivals that were finished in time; 1 if there were none."""
        return attainment(self.fates)

    def attainment_by_class(self) -> dict[str, float]:
        """The same within each service class."""
        classes = sorted({fate.arrival.slo_class for fate in self.fates})
        return {
            name: attainment([fate for fate in self.fates if fate.arrival.slo_class == name])
            for name in classes
        }


def attainment(fates: Sequence[Fate]) -> float:
    """Return the share of arrivals that were finished in time; 1 if there were none."""
    return sum(fate.is_met for fate in fates) / len(fates) if fates else 1.0


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Replicas of one model on one kind of device.

    Attributes:
        name: of the pool; begins its replicas' names.
        reported_cost: of a step, as the replicas report it; None for the true one.
        policy: what a replica does between two steps.
        mtbf_s: mean seconds between a replica's failures; infinite if they never fail.
        repair_s: seconds from a failure until the replica starts to load.
    """

    name: str
    model: str
    num_replicas: int
    hardware: Hardware
    max_batch: int
    max_in_flight: int
    reported_cost: StepCost | None = None
    policy: StepPolicy = mixed_batches
    mtbf_s: float = math.inf
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellSpec:
    """What is simulated.

    Attributes:
        promises_deadlines: whether the dispatcher gets the requests' deadlines and priorities;
            misses are counted by them anyway.
        when_late: what the dispatcher does with requests that would be late.
        most_steps: upper limit on the steps of every image; None for no limit.
        one_way_s: seconds that a message takes between a replica and the dispatcher.
        poll_s: longest time for which a poll is held.
        has_preemption: whether a running request may be preempted.
        services: devices that run all ControlNets; None where replicas run their own.
    """

    pools: tuple[PoolSpec, ...]
    seed: int = 0
    promises_deadlines: bool = True
    when_late: WhenLate = "accept"
    most_steps: int | None = None
    one_way_s: float = 0.0
    poll_s: float = 1.0
    has_preemption: bool = False
    services: ServiceSpec | None = None


class SimulatedCell:
    """Runs a workload through the dispatch core and its replicas.

    Args:
        spec: what is simulated.
        watch: called after every run of steps.
    """

    def __init__(self, spec: CellSpec, watch: Callable[[str, StepRun], None] | None = None) -> None:
        self._spec = spec
        self._watch = watch
        self.events = EventQueue()
        config = DispatchConfig(
            poll_s=spec.poll_s,
            replica_timeout_s=6 * spec.poll_s,
            preemption=spec.has_preemption,
        )
        self.core = DispatchCore(
            config=config,
            limits=UNLIMITED,
            epoch=1,
            configured={pool.model for pool in spec.pools},
        )
        services = spec.services
        self._services = None if services is None else ControlNetServices(services, self.events)
        self._dispatcher = SimulatedDispatcher(
            self.core,
            self.events,
            on_outcome=self._on_outcome,
            timeout_s=config.replica_timeout_s,
            one_way_s=spec.one_way_s,
        )
        self._arrivals: dict[str, Arrival] = {}
        self._views: dict[str, RequestView] = {}
        self._predicted_s: dict[str, float] = {}
        self._fates: dict[str, Fate] = {}
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._rng = np.random.default_rng([spec.seed, 9])
        self._last_s = 0.0
        self._live: dict[str, SimulatedReplica] = {}

    def run(self, workload: Sequence[Arrival]) -> CellResult:
        """Let a workload arrive, and wait until all accepted requests have ended."""
        self.core.controls.apply(_controlnets_of(workload, self._spec))
        for pool in self._spec.pools:
            for number in range(pool.num_replicas):
                self._bring_up(pool, f"{pool.name}-{number}")
        self.events.at_each(
            [one.arrival_s for one in workload],
            lambda number: self._arrive(f"{number}", workload[number]),
        )
        last_s = max((one.arrival_s for one in workload), default=0.0)
        self.events.run(until_s=last_s)
        while self._views:
            self.events.run(until_s=self.events.now_s + 60)
        return self._result(workload)

    def _bring_up(self, pool: PoolSpec, name: str) -> None:
        """Register a replica that has loaded, and schedule its failure."""
        hardware = pool.hardware
        seed = [self._spec.seed, *name.encode()]
        replica = SimulatedReplica(
            Registration(
                name,
                profile_of(pool.model),
                pool.max_in_flight,
                pool.max_batch,
                pool.reported_cost or hardware.cost,
            ),
            Device(hardware, seed, self._arrivals.__getitem__),
            pool.policy,
            self.events,
            view_of=self._views.__getitem__,
            report=partial(self._report, name),
            watch=self._watch,
            services=self._services,
        )
        self._live[name] = replica
        self._dispatcher.register(replica)
        if math.isfinite(pool.mtbf_s):
            life_s = float(self._rng.exponential(pool.mtbf_s))
            self.events.after(life_s, partial(self._fail, pool, name))

    def _report(self, name: str, reported: Sequence[ReplicaEvent]) -> None:
        """Pass on a replica's report, and note the progress of returned requests."""
        for event in reported:
            if isinstance(event, Returned) and event.request_id in self._views:
                view = self._views[event.request_id]
                self._views[event.request_id] = replace(view, steps_done=event.steps_done)
        self._dispatcher.report(name, reported)

    def _fail(self, pool: PoolSpec, name: str) -> None:
        replica = self._live.pop(name)
        replica.die()
        self._busy_s[name] += replica.busy_s
        self._dispatcher.forget(name)
        self.events.after(pool.repair_s, partial(self._load, pool, name))

    def _load(self, pool: PoolSpec, name: str) -> None:
        self.events.after(pool.hardware.load_s, partial(self._bring_up, pool, name))

    def _arrive(self, request_id: str, arrival: Arrival) -> None:
        request = _request_of(request_id, arrival, self._spec)
        deadline_s = arrival.arrival_s + arrival.slo_s
        self._arrivals[request_id] = arrival
        self._views[request_id] = request.view(arrival_s=arrival.arrival_s, deadline_s=deadline_s)
        offer = self._dispatcher.offer([request])
        if not offer.accepted:
            self._end(request_id, "refused")
            return
        self._predicted_s[request_id] = offer.predicted_s
        if offer.num_steps and request_id in self._views:
            view = self._views[request_id]
            self._views[request_id] = replace(view, num_steps=offer.num_steps[0])

    def _on_outcome(self, outcome: Outcome) -> None:
        finished = isinstance(outcome, Completed)
        self._end(outcome.request_id, "finished" if finished else "failed", outcome.attempts)

    def _end(self, request_id: str, end: End, attempts: int = 0) -> None:
        arrival, view = self._arrivals.pop(request_id), self._views.pop(request_id)
        self._last_s = self.events.now_s
        predicted_s = self._predicted_s.pop(request_id, 0.0)
        self._fates[request_id] = Fate(
            arrival, end, self._last_s, view.num_steps, attempts, predicted_s
        )

    def _result(self, workload: Sequence[Arrival]) -> CellResult:
        for name, replica in self._live.items():
            self._busy_s[name] += replica.busy_s
        for device in () if self._services is None else self._services.devices:
            self._busy_s[device.device_id] = device.busy_s
        fates = [self._fates[f"{number}"] for number in range(len(workload))]
        totals: Counter[End] = Counter(fate.end for fate in fates)
        return CellResult(fates, dict(self._busy_s), self._last_s, totals)


def _request_of(request_id: str, arrival: Arrival, spec: CellSpec) -> ImageRequest:
    has_deadline = spec.promises_deadlines
    fewest = arrival.fewest_steps if has_deadline else None
    num_steps = min(arrival.num_steps, spec.most_steps or arrival.num_steps)
    return ImageRequest(
        request_id=request_id,
        model=arrival.model,
        prompt="",
        width_px=arrival.width_px,
        height_px=arrival.height_px,
        num_steps=num_steps,
        guidance_scale=2.0 if arrival.uses_guidance else 1.0,
        sampler="ddim",
        seed=0,
        priority=arrival.priority if has_deadline else 0,
        # the same for all: requests are served in the order of arrival
        slo_s=arrival.slo_s if has_deadline and math.isfinite(arrival.slo_s) else _FAR_S,
        when_late=spec.when_late if has_deadline else "accept",
        terms=None if fewest is None else Terms("exact", num_steps, fewest),
        add_ons=AddOns(
            controls=tuple(ControlNetUse(name, _NO_MAP) for name in arrival.controlnets)
        ),
    )


def _controlnets_of(workload: Sequence[Arrival], spec: CellSpec) -> list[ControlNetConfig]:
    """Return the ControlNets that requests name; they are there from the beginning."""
    names = dict.fromkeys(name for arrival in workload for name in arrival.controlnets)
    bases = tuple(pool.model for pool in spec.pools)
    return [
        ControlNetConfig.model_construct(name=name, model=name, bases=bases, mode="local")
        for name in names
    ]


def profile_of(model: str) -> ModelProfile:
    """Return the profile of a simulated model, which accepts every size."""
    return ModelProfile(
        model=model,
        family="simulated",
        size_multiple_px=8,
        min_px=8,
        max_px=16384,
        default_width_px=1024,
        default_height_px=1024,
        default_num_steps=50,
        default_guidance_scale=2.0,
        default_sampler="ddim",
        max_steps_by_sampler={"ddim": 1000},
        max_prompt_tokens=10**6,
        created_s=0,
    )
