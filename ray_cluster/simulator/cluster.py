"""A simulated cluster behind the control loop's protocol: loads, failures, noise, cascades.

Every decision is a plan's or a policy's: which images are deferred (:mod:`policies.cascade` under
the plan's threshold), how large batches are, how many replicas there are. Requests go from stage to
stage as the live dispatcher's do (:mod:`dispatch.stages`).
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np

from ray_cluster.dispatch.stages import (
    RequestStages,
    Route,
    cascade_route,
    decide,
    direct_route,
    fail,
    finish_image,
    single_route,
)
from ray_cluster.policies.cascade import (
    answers_with_light,
    decide_deferral,
    heavy_finish_s,
    needs_slack,
)
from ray_cluster.policies.cluster_state import ClusterState, ModelState, ServiceState
from ray_cluster.policies.fleet import Fleet, ServiceSpec
from ray_cluster.policies.plan import CascadePlan, Knobs
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import SimulatedRequest
from ray_cluster.simulator.outcomes import Answer, Faults, SimulatedOutcome
from ray_cluster.simulator.scaling import Scaling, Watch
from ray_cluster.simulator.scorers import Scorers
from ray_cluster.simulator.serving import Serving

# a plan that has not come yet defers nothing
_NO_PLAN = CascadePlan("", 0.0)
_SCORER = "scorer"


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
        self._routes = {spec.name: _route_of(spec) for spec in fleet.services}
        self._direct_routes = {
            spec.name: direct_route(spec.cascade.heavy_model)
            for spec in fleet.services
            if spec.cascade
        }
        self._scorers = {
            spec.name: Scorers(events, spec.cascade.num_scorers, spec.cascade.discriminate_s)
            for spec in fleet.services
            if spec.cascade
        }
        self._stages: dict[int, RequestStages] = {}
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
        while self.serving.num_leased or any(one.num_held for one in self._scorers.values()):
            self._events.run(self._events.now_s + 1.0)

    @property
    def gpu_hours(self) -> float:
        """For which GPUs were held, loading or serving."""
        return self._scaling.gpu_hours

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return len(self._stages)

    def threshold_of(self, service: str) -> float:
        """Return the confidence threshold that is in force."""
        return self._plan_of(service).threshold

    def _plan_of(self, service: str) -> CascadePlan:
        return self._cascades.get(service, _NO_PLAN)

    # requests

    def offer(self, job: SimulatedRequest) -> None:
        """Take in a request at its arrival."""
        name = job.service
        self._num_arrived[name] += 1
        route, direct = self._routes[name], self._direct_routes.get(name)
        if direct and (job.is_direct or job.coin < self._plan_of(name).heavy_share):
            self._num_direct[name] += job.is_direct
            route = direct
        self._go_on(job, RequestStages(route))

    def _go_on(self, job: SimulatedRequest, stages: RequestStages) -> None:
        """Have the present stage done, or note how the request ended."""
        if stages.has_ended:
            del self._stages[job.number]
            self._note_end(job, stages)
            return
        self._stages[job.number] = stages
        if stages.present.kind == "score":
            self._scorers[job.service].score(partial(self._on_scored, job))
        else:
            self.serving.offer(stages.present.model, job, stages.index)

    def on_made(self, model: str, job: SimulatedRequest) -> None:
        """An image is done: it is the answer, or is to be scored."""
        stages = self._stages[job.number]
        assert stages.present.model == model
        self._go_on(job, finish_image(stages, stages.index))

    def _on_scored(self, job: SimulatedRequest) -> None:
        """A light image has its confidence: it is the answer, or is deferred."""
        stages, plan = self._stages[job.number], self._plan_of(job.service)
        self._confidences[job.service].append(job.confidence)
        if needs_slack(plan, job.confidence):
            decision = decide_deferral(plan, job.confidence, self._slack_s(job, stages.route))
        else:
            decision = decide_deferral(plan, job.confidence)
        self._go_on(job, decide(stages, stages.index, decision, job.confidence))

    def on_hopeless(self, job: SimulatedRequest) -> None:
        """An image won't come: the job gets the light answer if it has one and the plan says so."""
        stages, left_s = self._stages[job.number], job.deadline_s - self._events.now_s
        keeps_light = answers_with_light(self._plan_of(job.service), left_s)
        self._go_on(job, fail(stages, stages.index, "too_late", keeps_light=keeps_light))

    def _slack_s(self, job: SimulatedRequest, route: Route) -> float:
        """Seconds before the deadline that are left once the last stage is done."""
        finish_s = heavy_finish_s(self.serving.outlook(route.stages[-1].model))
        return job.deadline_s - self._events.now_s - finish_s

    def _note_end(self, job: SimulatedRequest, stages: RequestStages) -> None:
        now_s, published = self._events.now_s, stages.published
        on_time = published is not None and now_s <= job.deadline_s
        self._num_missed[job.service] += not on_time
        kept = published is not None and published.reason == "no_time"
        self.outcomes.append(
            SimulatedOutcome(job.service, job.arrival_s, now_s, _answer_of(stages), on_time, kept)
        )


def _route_of(spec: ServiceSpec) -> Route:
    if spec.cascade is None:
        return single_route(spec.model)
    return cascade_route(spec.model, _SCORER, spec.cascade.heavy_model)


def _answer_of(stages: RequestStages) -> Answer:
    """Whose image it got: the heavy model's stage is the last of its route."""
    if stages.published is None:
        return "dropped"
    route = stages.route
    is_heavy = route.kind != "single" and stages.published.model == route.stages[-1].model
    return "heavy" if is_heavy else "light"
