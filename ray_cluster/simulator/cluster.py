"""A simulated cluster behind the control loop's protocol: loads, failures, noise, cascades.

Every decision is a plan's or a policy's: which images are deferred (:mod:`policies.cascade` under
the plan's threshold), how large batches are, how many replicas there are.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from ray_cluster.policies.cascade import heavy_finish_s, request_threshold
from ray_cluster.policies.cluster_state import (
    ClusterState,
    DeviceState,
    ModelState,
    PoolState,
    ServiceState,
)
from ray_cluster.policies.fleet import Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.plan import CascadePlan, Knobs
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.gpu_time import GpuPool
from ray_cluster.simulator.model_server import Job, ModelServer, Replica
from ray_cluster.simulator.outcomes import Answer, Faults, Outcome

# a plan that has not come yet defers nothing
_NO_PLAN = CascadePlan("", 0.0)


class SimulatedCluster:
    """Replicas, queues and cascades on a virtual clock.

    Args:
        events: the clock.
        fleet: pools and services.
        num_gpus: of every type.
        rng: of failures, loads and noise.
        noise_cv: of the seconds of batches and loads, lognormal.
        faults: of GPUs; None for none.
        dwell_s: age below which a replica counts as young.
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
    ) -> None:
        self._events = events
        self._fleet = fleet
        self._rng = rng
        self._sigma = math.sqrt(math.log1p(noise_cv**2))
        self._faults = faults
        self._dwell_s = dwell_s
        self._gpus = {device: GpuPool(number) for device, number in num_gpus.items()}
        self._specs = {spec.name: spec for spec in fleet.pools}
        self._services = {spec.name: spec for spec in fleet.services}
        self._servers = {
            model: ModelServer(
                model, events, self, noise=self._factor, extra_s=self._extra_s(model)
            )
            for model in dict.fromkeys(pool.model for pool in fleet.pools)
        }
        self._replicas: dict[str, list[Replica]] = {name: [] for name in self._specs}
        self._wanted: dict[str, int] = dict.fromkeys(self._specs, 0)
        self._version = -1
        self._cascades: dict[str, CascadePlan] = {}
        self._num_arrived: dict[str, int] = defaultdict(int)
        self._num_direct: dict[str, int] = defaultdict(int)
        self._num_missed: dict[str, int] = defaultdict(int)
        self._confidences: dict[str, list[float]] = defaultdict(list)
        self.outcomes: list[Outcome] = []

    # the control loop's protocol

    def observe(self) -> ClusterState:
        """Return the state, with the confidences since the last call."""
        return ClusterState(
            now_s=self._events.now_s,
            devices=tuple(DeviceState(name, one.num_working) for name, one in self._gpus.items()),
            pools=tuple(self._pool_state(name) for name in self._specs),
            models=tuple(
                ModelState(name, server.num_waiting, server.num_in_batches)
                for name, server in self._servers.items()
            ),
            services=tuple(self._service_state(name) for name in self._services),
        )

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon."""
        self._wanted[pool] = num_replicas
        staying = [one for one in self._replicas[pool] if not one.is_leaving]
        # those that load go first, then idle ones, then whoever is free first
        staying.sort(key=lambda one: (one.is_ready, bool(one.batch), one.free_s, -one.started_s))
        for replica in staying[: max(0, len(staying) - num_replicas)]:
            self._stop(replica)
        self._start_wanted()

    def turn(self, knobs: Knobs) -> None:
        """Apply batch caps and thresholds at once; a version that is not later is ignored."""
        if knobs.version <= self._version:
            return
        self._version = knobs.version
        for pool, max_batch in knobs.max_batches:
            self._servers[self._specs[pool].model].max_batches[pool] = max_batch
        self._cascades = {one.service: one for one in knobs.cascades}

    # requests

    def offer(self, job: Job) -> None:
        """Take in a request at its arrival."""
        service = self._services[job.service]
        self._num_arrived[service.name] += 1
        plan = self._cascades.get(service.name, _NO_PLAN)
        if service.cascade and (job.is_direct or job.coin < plan.heavy_share):
            self._num_direct[service.name] += job.is_direct
            self._servers[service.cascade.heavy_model].offer(job)
        else:
            self._servers[service.model].offer(job)

    def on_made(self, model: str, job: Job) -> None:
        """An image is done: it is the answer, or is deferred to the heavy model."""
        service = self._services[job.service]
        if service.cascade is None or model == service.cascade.heavy_model:
            self._finish(job, "heavy" if service.cascade else "light")
            return
        job.has_light_answer = True
        self._confidences[service.name].append(job.confidence)
        plan = self._cascades.get(service.name, _NO_PLAN)
        heavy = self._servers[service.cascade.heavy_model]
        is_wanted = plan.routing == "confidence" and job.confidence < plan.threshold
        if is_wanted and job.confidence < self._threshold(plan, job, heavy):
            heavy.offer(job)
        else:
            self._finish(job, "light", kept=is_wanted)

    def on_hopeless(self, job: Job) -> None:
        """A job can't be in time: it gets the light answer if it has one and the plan says so."""
        plan = self._cascades.get(job.service, _NO_PLAN)
        may_answer = job.has_light_answer and plan.when_late == "light"
        if may_answer and self._events.now_s <= job.deadline_s:
            self._finish(job, "light", kept=True)
        else:
            self._finish(job, "dropped")

    def _threshold(self, plan: CascadePlan, job: Job, heavy: ModelServer) -> float:
        if plan.reserve_s is None:
            return plan.threshold
        finish_s = heavy_finish_s(heavy.outlook())
        slack_s = job.deadline_s - self._events.now_s - finish_s
        return request_threshold(plan.threshold, slack_s, plan.reserve_s)

    def _finish(self, job: Job, answer: Answer, *, kept: bool = False) -> None:
        on_time = answer != "dropped" and self._events.now_s <= job.deadline_s
        self._num_missed[job.service] += not on_time
        self.outcomes.append(
            Outcome(job.service, job.arrival_s, self._events.now_s, answer, on_time, kept)
        )

    def threshold_of(self, service: str) -> float:
        """Return the confidence threshold that is in force."""
        return self._cascades.get(service, _NO_PLAN).threshold

    # replicas

    @property
    def gpu_hours(self) -> float:
        """For which GPUs were held, loading or serving."""
        return sum(one.held_s(self._events.now_s) for one in self._gpus.values()) / 3600

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return sum(one.num_waiting + one.num_in_batches for one in self._servers.values())

    def on_gone(self, replica: Replica) -> None:
        """A replica has left: its GPUs are for others."""
        self._forget(replica)
        self._start_wanted()

    def _start_wanted(self) -> None:
        for name, spec in self._specs.items():
            num_missing = self._wanted[name] - self._num_staying(name)
            free = self._gpus[spec.device]
            for _ in range(min(num_missing, free.num_free // spec.gpus_per_replica)):
                self._start(spec)

    def _num_staying(self, pool: str) -> int:
        return sum(not one.is_leaving for one in self._replicas[pool])

    def _start(self, spec: PoolSpec) -> None:
        gpus = self._gpus[spec.device].take(spec.gpus_per_replica, self._events.now_s)
        replica = Replica(spec, gpus, started_s=self._events.now_s)
        self._replicas[spec.name].append(replica)
        load_s = spec.load_s * self._factor()
        replica.timer = self._events.after(load_s, lambda: self._ready(replica))
        if self._faults is not None and math.isfinite(self._faults.mean_s_between):
            lives_s = self._rng.exponential(self._faults.mean_s_between / len(gpus))
            self._events.after(lives_s, lambda: self._fail(replica))

    def _ready(self, replica: Replica) -> None:
        replica.is_ready, replica.timer = True, None
        replica.free_s = self._events.now_s
        self._servers[replica.spec.model].add(replica)

    def _stop(self, replica: Replica) -> None:
        if replica.is_ready:
            self._servers[replica.spec.model].remove(replica)
            return
        if replica.timer is not None:
            replica.timer.call_off()
        replica.is_leaving = True
        self.on_gone(replica)

    def _fail(self, replica: Replica) -> None:
        if replica not in self._replicas[replica.spec.name]:
            return
        assert self._faults is not None
        device, gpu = self._gpus[replica.spec.device], replica.gpus[0]
        device.break_down(gpu)
        if replica.is_ready:
            self._servers[replica.spec.model].fail(replica)
        elif replica.timer is not None:
            replica.timer.call_off()
        self._forget(replica)

        def repaired() -> None:
            device.repair(gpu)
            self._start_wanted()

        self._events.after(self._faults.repair_s, repaired)
        self._start_wanted()

    def _forget(self, replica: Replica) -> None:
        self._replicas[replica.spec.name].remove(replica)
        self._gpus[replica.spec.device].give_back(replica.gpus, self._events.now_s)

    # what is seen

    def _pool_state(self, name: str) -> PoolState:
        staying = [one for one in self._replicas[name] if not one.is_leaving]
        young_s = self._events.now_s - self._dwell_s
        return PoolState(
            name,
            num_ready=sum(one.is_ready for one in staying),
            num_loading=sum(not one.is_ready for one in staying),
            num_young=sum(one.started_s > young_s for one in staying),
        )

    def _service_state(self, name: str) -> ServiceState:
        return ServiceState(
            name,
            self._num_arrived[name],
            self._num_direct[name],
            self._num_missed[name],
            tuple(self._confidences.pop(name, ())),
        )

    def _extra_s(self, model: str) -> float:
        owners: list[ServiceSpec] = [one for one in self._fleet.services if one.model == model]
        return max((one.cascade.discriminate_s for one in owners if one.cascade), default=0.0)

    def _factor(self) -> float:
        """A lognormal factor with a mean of 1."""
        if self._sigma == 0:
            return 1.0
        return float(math.exp(self._rng.normal(-(self._sigma**2) / 2, self._sigma)))
