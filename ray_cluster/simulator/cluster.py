"""A simulated cluster behind the control loop's protocol: loads, failures, noise, cascades.

Every decision is a plan's or a policy's: which images are deferred (:mod:`policies.cascade` under
the plan's threshold), how large batches are, how many replicas there are.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ray_cluster.policies.cascade import heavy_finish_s, request_threshold
from ray_cluster.policies.cluster_state import ClusterState, ModelState, ServiceState
from ray_cluster.policies.fleet import Fleet
from ray_cluster.policies.plan import CascadePlan, Knobs
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import SimulatedRequest
from ray_cluster.simulator.outcomes import Answer, Faults, SimulatedOutcome
from ray_cluster.simulator.scaling import Scaling, Watch
from ray_cluster.simulator.serving import Serving

# a plan that has not come yet defers nothing
_NO_PLAN = CascadePlan("", 0.0)


class SimulatedCluster:
    """Cascades on a virtual clock, before the production dispatch core and its replicas.

    Attributes:
        serving: the core and what it feeds; to be looked at only.
        outcomes: of all requests that have ended.

    Args:
        events: the clock.
        fleet: pools and services.
        num_gpus: of every type.
        rng: of failures, loads and noise.
        noise_cv: of the seconds of batches and loads, lognormal.
        faults: of GPUs; None for none.
        dwell_s: age below which a replica counts as young.
        watch: told of every batch that was made.
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
        self._events = events
        self._dwell_s = dwell_s
        self._models = tuple(dict.fromkeys(pool.model for pool in fleet.pools))
        self._services = {spec.name: spec for spec in fleet.services}
        seed = int(rng.integers(2**32))
        self.serving = Serving(fleet, events, self, seed=seed, noise_cv=noise_cv)
        self._scaling = Scaling(
            events,
            fleet,
            num_gpus,
            self.serving,
            rng,
            noise_cv=noise_cv,
            faults=faults,
            watch=watch,
        )
        self._version = -1
        self._cascades: dict[str, CascadePlan] = {}
        self._num_arrived: dict[str, int] = defaultdict(int)
        self._num_direct: dict[str, int] = defaultdict(int)
        self._num_missed: dict[str, int] = defaultdict(int)
        self._confidences: dict[str, list[float]] = defaultdict(list)
        self.outcomes: list[SimulatedOutcome] = []

    # the control loop's protocol

    def observe(self) -> ClusterState:
        """Return the state, with the confidences since the last call."""
        serving = self.serving
        return ClusterState(
            now_s=self._events.now_s,
            devices=self._scaling.devices(),
            pools=self._scaling.pools(self._dwell_s),
            models=tuple(
                ModelState(name, serving.num_waiting(name), serving.num_in_batches(name))
                for name in self._models
            ),
            services=tuple(self._service_state(name) for name in self._services),
        )

    def _service_state(self, name: str) -> ServiceState:
        return ServiceState(
            name,
            self._num_arrived[name],
            self._num_direct[name],
            self._num_missed[name],
            tuple(self._confidences.pop(name, ())),
        )

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon."""
        self._scaling.scale(pool, num_replicas)

    def turn(self, knobs: Knobs) -> None:
        """Apply batch caps and thresholds at once; a version that is not later is ignored."""
        if knobs.version <= self._version:
            return
        self._version = knobs.version
        for pool, max_batch in knobs.max_batches:
            self.serving.turn(pool, max_batch)
        self._cascades = {one.service: one for one in knobs.cascades}

    def run_out(self) -> None:
        """Let time pass until nothing is made any more; who waits then has nobody to wait for.

        Replicas never end to poll, so that the clock alone would go on for ever.
        """
        while self.serving.num_leased:
            self._events.run(self._events.now_s + 1.0)

    @property
    def gpu_hours(self) -> float:
        """For which GPUs were held, loading or serving."""
        return self._scaling.gpu_hours

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return self.serving.num_running

    def threshold_of(self, service: str) -> float:
        """Return the confidence threshold that is in force."""
        return self._cascades.get(service, _NO_PLAN).threshold

    # requests

    def offer(self, job: SimulatedRequest) -> None:
        """Take in a request at its arrival."""
        service = self._services[job.service]
        self._num_arrived[service.name] += 1
        plan = self._cascades.get(service.name, _NO_PLAN)
        if service.cascade and (job.is_direct or job.coin < plan.heavy_share):
            self._num_direct[service.name] += job.is_direct
            self.serving.offer(service.cascade.heavy_model, job)
        else:
            self.serving.offer(service.model, job)

    def on_made(self, model: str, job: SimulatedRequest) -> None:
        """An image is done: it is the answer, or is deferred to the heavy model."""
        service = self._services[job.service]
        if service.cascade is None or model == service.cascade.heavy_model:
            self._finish(job, "heavy" if service.cascade else "light")
            return
        job.has_light_answer = True
        self._confidences[service.name].append(job.confidence)
        plan = self._cascades.get(service.name, _NO_PLAN)
        heavy = service.cascade.heavy_model
        is_wanted = plan.routing == "confidence" and job.confidence < plan.threshold
        if is_wanted and job.confidence < self._threshold(plan, job, heavy):
            self.serving.offer(heavy, job)
        else:
            self._finish(job, "light", kept=is_wanted)

    def on_hopeless(self, job: SimulatedRequest) -> None:
        """An image won't come: the job gets the light answer if it has one and the plan says so."""
        plan = self._cascades.get(job.service, _NO_PLAN)
        may_answer = job.has_light_answer and plan.when_late == "light"
        if may_answer and self._events.now_s <= job.deadline_s:
            self._finish(job, "light", kept=True)
        else:
            self._finish(job, "dropped")

    def _threshold(self, plan: CascadePlan, job: SimulatedRequest, heavy: str) -> float:
        if plan.reserve_s is None:
            return plan.threshold
        finish_s = heavy_finish_s(self.serving.outlook(heavy))
        slack_s = job.deadline_s - self._events.now_s - finish_s
        return request_threshold(plan.threshold, slack_s, plan.reserve_s)

    def _finish(self, job: SimulatedRequest, answer: Answer, *, kept: bool = False) -> None:
        on_time = answer != "dropped" and self._events.now_s <= job.deadline_s
        self._num_missed[job.service] += not on_time
        self.outcomes.append(
            SimulatedOutcome(job.service, job.arrival_s, self._events.now_s, answer, on_time, kept)
        )
