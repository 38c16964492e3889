"""A simulated cell: arrivals, replicas of several pools, and the production dispatch core.

Requests go through stages as in the live service: replicas of all kinds lease from one core.
Refused, dropped, failed and late requests all count as missed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.settings import CascadeSettings
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.fidelity import Terms
from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.policies.steps.mixed_batching import mixed_batches
from ray_cluster.policies.steps.step_policy import StepPolicy
from ray_cluster.policies.types import RequestView, StepCost, WhenLate
from ray_cluster.protocol.leases import Failed, Registration, ReplicaEvent, Returned
from ray_cluster.protocol.outcomes import CascadeStage, Completed, Outcome
from ray_cluster.requests import (
    AddOns,
    BlobRef,
    CascadeUse,
    ControlNetUse,
    ImageRequest,
    LightStage,
    ModelProfile,
    Reference,
)
from ray_cluster.simulator.controlnets.services import ControlNetServices, ServiceSpec
from ray_cluster.simulator.dispatcher import SimulatedDispatcher
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Device, Hardware
from ray_cluster.simulator.replica import Host, SimulatedReplica, StepRun
from ray_cluster.simulator.workload import Arrival

# a deadline that never matters
_FAR_S = 1e7
# only policies refuse requests here, no limit
UNLIMITED = LimitsConfig(max_queued_images=10**7, max_queue_s=_FAR_S)
_NO_MAP = BlobRef("", 0)
SCORER = "scorer"
# without any step or end for so long nothing will come of what is open
_PATIENCE_S, _PART_S = 7200.0, 60.0

End = Literal["finished", "refused", "failed", "open"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of an arrival.

    Attributes:
        end: `open` if it was accepted and nothing came of it.
        end_s: instant of the end.
        num_steps: with how many it was made.
        attempts: leases it took.
        predicted_s: seconds from the arrival to the end, as predicted at admission.
        stage: of a cascade, that made the answer.
        is_kept: whether that is the light one for want of time.
    """

    arrival: Arrival
    end: End
    end_s: float
    num_steps: int = 0
    attempts: int = 0
    predicted_s: float = 0.0
    stage: CascadeStage | None = None
    is_kept: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it was finished in time, with no fewer steps than its client accepts."""
        arrival = self.arrival
        is_whole = self.num_steps >= (arrival.fewest_steps or arrival.num_steps)
        return self.end == "finished" and is_whole and self.end_s <= arrival.deadline_s


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
        model: that it serves; a discriminator's name, of one that scores.
        num_replicas: from the beginning.
        reported_cost: of a step, as the replicas report it; None for the true one.
        policy: what a replica does between two steps.
        mtbf_s: mean seconds between a replica's failures; infinite if they never fail.
        repair_s: seconds from a failure until the replica starts to load.
        kind: whether it makes images or scores them.
        cap: of batches of whole images, until :meth:`SimulatedCell.set_cap`; None where requests
            join at steps.
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
    kind: Literal["denoise", "score"] = "denoise"
    cap: int | None = None

    def registration(self, replica_id: str) -> Registration:
        is_scorer = self.kind == "score"
        return Registration(
            replica_id,
            None if is_scorer else profile_of(self.model),
            self.max_in_flight,
            self.max_batch,
            self.reported_cost or self.hardware.cost,
            kind=self.kind,
            served_as=self.model if is_scorer else "",
        )


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
        cascades: light and heavy model, by the name that requests have as their model; replicas of
            `SCORER` score.
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
    cascades: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class SimulatedCell:
    """Runs a workload through the dispatch core and its replicas.

    Attributes:
        core: the production one; read-only.

    Args:
        spec: what is simulated.
        watch: called after every run of steps.
        events: a clock of its own if None.
        on_end: called with the id of every request that ends, and what became of it.
    """

    def __init__(
        self,
        spec: CellSpec,
        watch: Callable[[str, StepRun], None] | None = None,
        *,
        events: EventQueue | None = None,
        on_end: Callable[[str, Fate], None] | None = None,
    ) -> None:
        self._spec, self._watch, self._on_end = spec, watch, on_end
        self.events = events or EventQueue()
        config = DispatchConfig(
            poll_s=spec.poll_s, replica_timeout_s=6 * spec.poll_s, preemption=spec.has_preemption
        )
        self.core = DispatchCore(
            config=config,
            limits=UNLIMITED,
            epoch=1,
            configured={pool.model for pool in spec.pools if pool.kind == "denoise"},
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
        self._plans: dict[str, CascadePlan] = {}
        self._caps = {pool.name: pool.cap for pool in spec.pools}
        self._arrivals: dict[str, Arrival] = {}
        self._views: dict[str, RequestView] = {}
        self._predicted_s: dict[str, float] = {}
        self._fates: dict[str, Fate] = {}
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._rng = np.random.default_rng([spec.seed, 9])
        # instants of the last end, and of the last step or end
        self._last_s = self._alive_s = 0.0
        self._live: dict[str, tuple[PoolSpec, SimulatedReplica]] = {}

    def run(self, workload: Sequence[Arrival]) -> CellResult:
        """Let a workload arrive, and wait until all accepted requests have ended."""
        self.core.controls.apply(_controlnets_of(workload, self._spec))
        self.start()
        self.events.at_each(
            [one.arrival_s for one in workload],
            lambda number: self.arrive(f"{number}", workload[number]),
        )
        self.events.run(until_s=max((one.arrival_s for one in workload), default=0.0))
        self.run_out()
        return self._result(workload)

    def start(self) -> None:
        """Bring up the replicas that there are from the beginning."""
        for pool in self._spec.pools:
            for number in range(pool.num_replicas):
                self.bring_up(pool, f"{pool.name}-{number}")
            if not pool.num_replicas:
                # as if it had been served before, so that requests are queued, not refused
                self.core.register(pool.registration(pool.name), self.events.now_s)
                self.core.unregister(pool.name, self.events.now_s)
        if self._spec.cascades:
            self.apply(())
            self._dispatcher.keep_house()

    def run_out(self) -> None:
        """Let time pass until all requests have ended, or nothing will come of those that have not.

        Replicas poll for ever, so the event queue never becomes empty.
        """
        pools = self._spec.pools
        patience_s = _PATIENCE_S + max(one.repair_s + one.hardware.load_s for one in pools)
        self._alive_s = self.events.now_s
        while self._views and self.events.now_s < self._alive_s + patience_s:
            self.events.run(until_s=self.events.now_s + _PART_S)

    # replicas

    def bring_up(self, pool: PoolSpec, name: str) -> None:
        """Register a replica that has loaded, and schedule its failure."""
        hardware = pool.hardware
        is_scorer = pool.kind == "score"
        replica = SimulatedReplica(
            pool.registration(name),
            Device(hardware, [self._spec.seed, *name.encode()], self._arrivals.__getitem__),
            pool.policy,
            self.events,
            host=Host(
                view_of=self._scored_view if is_scorer else self._views.__getitem__,
                report=partial(self._report, name),
                watch=self._watched,
                poll_anew=partial(self._dispatcher.poll_anew, name),
                score_of=self._confidence_of if is_scorer else None,
            ),
            services=self._services,
            cap=self._caps[pool.name],
        )
        self._live[name] = (pool, replica)
        self._dispatcher.register(replica)
        if math.isfinite(pool.mtbf_s):
            life_s = float(self._rng.exponential(pool.mtbf_s))
            self.events.after(life_s, partial(self._fail, pool, name))

    def _watched(self, name: str, run: StepRun) -> None:
        self._alive_s = self.events.now_s
        if self._watch is not None:
            self._watch(name, run)

    def _scored_view(self, request_id: str) -> RequestView:
        return replace(self._views[request_id], num_steps=1)

    def _confidence_of(self, request_id: str) -> float:
        return self._arrivals[request_id].confidence

    def set_cap(self, pool: str, max_batch: int) -> None:
        """Cap the batches of a pool of whole images from now on."""
        self._caps[pool] = max(1, max_batch)
        for spec, replica in list(self._live.values()):
            if spec.name == pool:
                replica.set_cap(max(1, max_batch))

    def drain(self, name: str, on_drained: Callable[[], None]) -> None:
        """Let a replica end what it holds, and leave; calls back then."""

        def leave() -> None:
            self._lose(name)
            self._dispatcher.unregister(name)
            on_drained()

        self._live[name][1].drain(leave)

    def fail(self, name: str) -> None:
        """Lose a replica without notice; the core finds out by its silence."""
        self._live[name][1].die()
        self._lose(name)
        self._dispatcher.forget(name)

    def _lose(self, name: str) -> None:
        _, replica = self._live.pop(name)
        self._busy_s[name] += replica.busy_s

    def _fail(self, pool: PoolSpec, name: str) -> None:
        self.fail(name)
        self.events.after(pool.repair_s, partial(self._load, pool, name))

    def _load(self, pool: PoolSpec, name: str) -> None:
        self.events.after(pool.hardware.load_s, partial(self.bring_up, pool, name))

    def _report(self, name: str, reported: Sequence[ReplicaEvent]) -> None:
        """Pass on a replica's report, and note the progress of returned requests."""
        for event in reported:
            if isinstance(event, Returned) and event.request_id in self._views:
                view = self._views[event.request_id]
                self._views[event.request_id] = replace(view, steps_done=event.steps_done)
        self._dispatcher.report(name, [self._as_planned(one) for one in reported])

    def _as_planned(self, event: ReplicaEvent) -> ReplicaEvent:
        """Return what a replica drops for want of time as an error, if an image so far answers."""
        if isinstance(event, Failed) and event.request_id in self._arrivals:
            plan = self._plans.get(self._arrivals[event.request_id].model)
            if plan is not None and plan.when_late == "light":
                return replace(event, failure=replace(event.failure, kind="error"))
        return event

    # requests

    @property
    def num_open(self) -> int:
        """Requests that have come and not ended."""
        return len(self._views)

    def apply(self, plans: Iterable[CascadePlan]) -> None:
        """Route the requests of cascades by other plans from now on."""
        given, cascades = {one.service: one for one in plans}, self._spec.cascades
        # one without a plan defers nothing
        self._plans = {name: given.get(name, CascadePlan(name, 0.0)) for name in cascades}
        self.core.cascades.apply(
            [_settings_of(one, *cascades[name]) for name, one in self._plans.items()]
        )

    def arrive(self, request_id: str, arrival: Arrival) -> None:
        """Offer a request at its arrival."""
        request = self._request_of(request_id, arrival)
        self._arrivals[request_id] = arrival
        self._views[request_id] = request.view(
            arrival_s=arrival.arrival_s, deadline_s=arrival.deadline_s
        )
        offer = self._dispatcher.offer([request])
        if not offer.accepted:
            self._end(request_id, "refused")
            return
        self._predicted_s[request_id] = offer.predicted_s
        if offer.num_steps and request_id in self._views:
            view = self._views[request_id]
            self._views[request_id] = replace(view, num_steps=offer.num_steps[0])

    def _request_of(self, request_id: str, arrival: Arrival) -> ImageRequest:
        spec, cascade = self._spec, self._spec.cascades.get(arrival.model)
        has_deadline = spec.promises_deadlines
        fewest = arrival.fewest_steps if has_deadline else None
        num_steps = min(arrival.num_steps, spec.most_steps or arrival.num_steps)
        controls = tuple(ControlNetUse(name, _NO_MAP) for name in arrival.controlnets)
        seen_px = arrival.reference_px
        use = None
        if cascade is not None:
            use = CascadeUse(arrival.model, LightStage(cascade[0], SCORER, num_steps, 1.0, "ddim"))
            if arrival.coin < self._plans[arrival.model].heavy_share:
                use = CascadeUse(arrival.model, entry="heavy")
        return ImageRequest(
            request_id=request_id,
            model=arrival.model if cascade is None else cascade[1],
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
            add_ons=AddOns(controls=controls),
            references=(Reference(_NO_MAP, seen_px, 1),) if seen_px else (),
            cascade=use,
        )

    def _on_outcome(self, outcome: Outcome) -> None:
        answer = outcome.cascade if isinstance(outcome, Completed) else None
        self._end(
            outcome.request_id,
            "finished" if isinstance(outcome, Completed) else "failed",
            attempts=outcome.attempts,
            stage=None if answer is None else answer.stage,
            is_kept=answer is not None and answer.reason in ("no_time", "heavy_failed"),
        )

    def _end(self, request_id: str, end: End, **of_fate: Any) -> None:
        arrival, view = self._arrivals.pop(request_id), self._views.pop(request_id)
        self._last_s = self._alive_s = self.events.now_s
        of_fate["predicted_s"] = self._predicted_s.pop(request_id, 0.0)
        fate = Fate(arrival, end, self._last_s, view.num_steps, **of_fate)
        if self._on_end is None:
            self._fates[request_id] = fate
        else:
            self._on_end(request_id, fate)

    def _result(self, workload: Sequence[Arrival]) -> CellResult:
        for name in list(self._live):
            self._lose(name)
        for device in () if self._services is None else self._services.devices:
            self._busy_s[device.device_id] = device.busy_s
        now_s = self.events.now_s
        fates = [
            self._fates.get(f"{number}") or Fate(one, "open", now_s)
            for number, one in enumerate(workload)
        ]
        totals: Counter[End] = Counter(fate.end for fate in fates)
        return CellResult(fates, dict(self._busy_s), self._last_s, totals)


def _settings_of(plan: CascadePlan, light: str, heavy: str) -> CascadeSettings:
    """Return a cascade's settings as a plan has them; one that routes by chance defers nothing."""
    is_random = plan.routing == "random"
    return CascadeSettings.model_construct(
        name=plan.service,
        light=light,
        heavy=heavy,
        discriminator=SCORER,
        threshold=0.0 if is_random else plan.threshold,
        reserve_s=None if is_random else plan.reserve_s,
        idle_threshold=None if is_random else plan.idle_threshold,
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
