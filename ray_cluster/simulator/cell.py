"""A simulated cell: arrivals, replicas of several pools, and the production dispatch core."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ray_cluster.config.sections import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.fidelity import Terms
from ray_cluster.policies.mixed_batching import mixed_batches
from ray_cluster.policies.step_policy import StepPolicy
from ray_cluster.policies.types import RequestView, StepCost, WhenLate
from ray_cluster.protocol.leases import Registration, ReplicaEvent, Returned
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import ImageRequest, ModelProfile
from ray_cluster.simulator.dispatcher import SimulatedDispatcher
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.fates import CellResult, End, Fate
from ray_cluster.simulator.noise import Device, Hardware
from ray_cluster.simulator.replica import SimulatedReplica, StepRun
from ray_cluster.simulator.workload import Arrival

# a deadline that never matters
_FAR_S = 1e7
# most that can wait: a simulation shows what the policies refuse, not what a limit does
_NUM_QUEUED = 10**7


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Replicas of one model on one kind of device.

    Attributes:
        name: of the pool; begins its replicas' names.
        told_cost: of a step, as the replicas tell the dispatcher; None if they know it exactly.
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
    told_cost: StepCost | None = None
    policy: StepPolicy = mixed_batches
    mtbf_s: float = math.inf
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellSpec:
    """What is simulated.

    Attributes:
        promises_deadlines: whether the dispatcher is told of deadlines, not only who counts misses.
        when_late: whether requests are wanted though they will be late.
        most_steps: with how many steps images are made whatever is asked for; None for all.
        one_way_s: seconds that a message takes between a replica and the dispatcher.
        poll_s: longest time for which a poll is held.
        steps_singly: whether replicas ask their policy at every step.
        has_preemption: whether leased requests may give way to others.
    """

    pools: tuple[PoolSpec, ...]
    seed: int = 0
    promises_deadlines: bool = True
    when_late: WhenLate = "accept"
    most_steps: int | None = None
    one_way_s: float = 0.0
    poll_s: float = 1.0
    steps_singly: bool = False
    has_preemption: bool = False


class SimulatedCell:
    """Runs a workload through the dispatch core and its replicas.

    Args:
        spec: what is simulated.
        watch: told of every run of steps when it is over.
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
            limits=LimitsConfig(max_queued_images=_NUM_QUEUED),
            epoch=1,
            configured={pool.model for pool in spec.pools},
        )
        self._dispatcher = SimulatedDispatcher(
            self.core,
            self.events,
            keep=self._keep,
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
        """Let a workload arrive, and wait until all that was accepted has ended."""
        for pool in self._spec.pools:
            for number in range(pool.num_replicas):
                self._start(pool, f"{pool.name}-{number}", loads=False)
        self.events.at_each(
            [one.arrival_s for one in workload],
            lambda number: self._arrive(f"{number}", workload[number]),
        )
        last_s = max((one.arrival_s for one in workload), default=0.0)
        self.events.run(until_s=last_s)
        while self._views:
            self.events.run(until_s=self.events.now_s + 60)
        return self._result(workload)

    def _start(self, pool: PoolSpec, name: str, *, loads: bool) -> None:
        """Bring a replica up, and let it fail in its time."""
        hardware = pool.hardware
        if loads:
            self.events.after(hardware.load_s, partial(self._come_up, pool, name))
        else:
            self._come_up(pool, name)

    def _come_up(self, pool: PoolSpec, name: str) -> None:
        hardware = pool.hardware
        seed = [self._spec.seed, *name.encode()]
        replica = SimulatedReplica(
            Registration(
                name,
                profile_of(pool.model),
                pool.max_in_flight,
                pool.max_batch,
                pool.told_cost or hardware.cost,
            ),
            Device(hardware, seed, self._arrivals.__getitem__),
            pool.policy,
            self.events,
            view_of=self._views.__getitem__,
            report=partial(self._report, name),
            watch=self._watch,
            steps_singly=self._spec.steps_singly,
        )
        self._live[name] = replica
        self._dispatcher.register(replica)
        if math.isfinite(pool.mtbf_s):
            life_s = float(self._rng.exponential(pool.mtbf_s))
            self.events.after(life_s, partial(self._fail, pool, name))

    def _report(self, name: str, told: Sequence[ReplicaEvent]) -> None:
        """Pass on what a replica says, and keep the states of what it hands back."""
        for event in told:
            if isinstance(event, Returned) and event.request_id in self._views:
                view = self._views[event.request_id]
                self._views[event.request_id] = replace(view, steps_done=event.steps_done)
        self._dispatcher.report(name, told)

    def _fail(self, pool: PoolSpec, name: str) -> None:
        replica = self._live.pop(name)
        replica.die()
        self._busy_s[name] += replica.busy_s
        self._dispatcher.forget(name)
        self.events.after(pool.repair_s, partial(self._start, pool, name, loads=True))

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

    def _keep(self, outcome: Outcome) -> None:
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
        fates = [self._fates[f"{number}"] for number in range(len(workload))]
        totals: Counter[End] = Counter(fate.end for fate in fates)
        return CellResult(fates, dict(self._busy_s), self._last_s, self.events.num_happened, totals)


def _request_of(request_id: str, arrival: Arrival, spec: CellSpec) -> ImageRequest:
    is_told = spec.promises_deadlines
    fewest = arrival.fewest_steps if is_told else None
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
        priority=arrival.priority if is_told else 0,
        # all alike: they are served as they come
        slo_s=arrival.slo_s if is_told and math.isfinite(arrival.slo_s) else _FAR_S,
        when_late=spec.when_late if is_told else "accept",
        terms=None if fewest is None else Terms("exact", num_steps, fewest),
    )


def profile_of(model: str) -> ModelProfile:
    """Return what simulated replicas say of a model: it takes everything."""
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
