"""A simulated cluster behind the control loop's protocol: loads, failures, noise, cascades.

Every decision is a plan's or a policy's: which images are deferred, how large batches are, how many
replicas there are. Requests go through stages as in the live dispatcher
(`dispatch/stages.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from heapq import heapreplace

import numpy as np

from ray_cluster.dispatch.stages import (
    RequestStages,
    cascade,
    decide,
    fail,
    finish,
    single,
)
from ray_cluster.policies.cascade import (
    Slack,
    answers_with_light,
    decide_deferral,
    needs_slack,
    slack_of,
)
from ray_cluster.policies.planning.cluster_state import ClusterState, ModelState, ServiceState
from ray_cluster.policies.planning.fleet import Fleet, ServiceSpec
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.simulator.control.requests import Answer, SimulatedOutcome, SimulatedRequest
from ray_cluster.simulator.control.scaling import Faults, Scaling, Watch
from ray_cluster.simulator.control.serving import Serving
from ray_cluster.simulator.events import EventQueue

# a plan that has not come yet defers nothing
_NO_PLAN = CascadePlan("", 0.0)
_SCORER = "scorer"


class Scorers:
    """Replicas of a scorer: one image each at a time, first come, first served.

    Attributes:
        num_held: images that wait for a score or are being scored.

    Args:
        num_replicas: None for infinite capacity, which takes no time.
        image_s: seconds that a replica takes for an image.
    """

    def __init__(self, events: EventQueue, num_replicas: int | None, image_s: float) -> None:
        self._events = events
        self._image_s = image_s
        self._free_at_s = None if num_replicas is None else [0.0] * num_replicas
        self.num_held = 0

    def score(self, on_scored: Callable[[], None]) -> None:
        """Score an image; calls back when that is done."""
        if self._free_at_s is None:
            on_scored()
            return
        self.num_held += 1
        end_s = max(self._free_at_s[0], self._events.now_s) + self._image_s
        heapreplace(self._free_at_s, end_s)

        def done() -> None:
            self.num_held -= 1
            on_scored()

        self._events.at(end_s, done)


class SimulatedCluster:
    """Services and cascades on a virtual clock, served by the production dispatch core.

    Attributes:
        serving: the dispatch core and its replicas; read-only.
        outcomes: of all requests that have ended.

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
        self._events = events
        self._dwell_s = dwell_s
        self._models = tuple(dict.fromkeys(pool.model for pool in fleet.pools))
        self._services = {spec.name: spec for spec in fleet.services}
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
            num_missed=self._num_missed[name],
            confidences=tuple(self._confidences.pop(name, ())),
        )

    def scale(self, pool: str, num_replicas: int) -> None:
        """Start or stop replicas until there are so many."""
        self._scaling.scale(pool, num_replicas)

    def apply(self, settings: PlannedSettings) -> None:
        """Apply batch caps and thresholds at once; a version that is not later is ignored."""
        if settings.version <= self._version:
            return
        self._version = settings.version
        for pool, max_batch in settings.max_batches:
            self.serving.set_cap(pool, max_batch)
        self._cascades = {one.service: one for one in settings.cascades}

    def run_out(self) -> None:
        """Let time pass until nothing runs any more; what waits then has no replica.

        Replicas poll for ever, so the event queue never becomes empty.
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

    def _plan_of(self, service: str) -> CascadePlan:
        return self._cascades.get(service, _NO_PLAN)

    # requests

    def offer(self, request: SimulatedRequest) -> None:
        """Admit a request at its arrival."""
        name = request.service
        self._num_arrived[name] += 1
        is_direct = request.coin < self._plan_of(name).heavy_share
        self._go_on(request, _begun(self._services[name], is_direct=is_direct))

    def _go_on(self, request: SimulatedRequest, stages: RequestStages) -> None:
        """Start the present stage, or note how the request ended."""
        if stages.has_ended:
            del self._stages[request.number]
            self._note_end(request, stages)
            return
        self._stages[request.number] = stages
        if stages.present.rules.decides:
            self._scorers[request.service].score(partial(self._on_scored, request))
        else:
            self.serving.offer(stages.present.model, request, stages.index)

    def on_made(self, model: str, request: SimulatedRequest) -> None:
        """An image is done: it is the answer, or goes to the scorer."""
        stages = self._stages[request.number]
        assert stages.present.model == model
        self._go_on(request, finish(stages, stages.index))

    def _on_scored(self, request: SimulatedRequest) -> None:
        """A light image has its confidence: it is the answer, or is deferred."""
        stages, plan = self._stages[request.number], self._plan_of(request.service)
        self._confidences[request.service].append(request.confidence)
        if needs_slack(plan, request.confidence):
            decision = decide_deferral(plan, request.confidence, self._slack(request, stages))
        else:
            decision = decide_deferral(plan, request.confidence)
        self._go_on(request, decide(stages, stages.index, decision, request.confidence))

    def on_hopeless(self, request: SimulatedRequest) -> None:
        """An image can't be made in time: the answer is the light one if the plan says so."""
        stages, left_s = self._stages[request.number], request.deadline_s - self._events.now_s
        keeps_image = answers_with_light(self._plan_of(request.service), left_s)
        self._go_on(request, fail(stages, stages.index, "too_late", keeps_image=keeps_image))

    def _slack(self, request: SimulatedRequest, stages: RequestStages) -> Slack:
        """Seconds before the deadline that are left once the next stage is done."""
        outlook = self.serving.outlook(stages.specs[stages.index + 1].model)
        return slack_of(outlook, request.deadline_s - self._events.now_s)

    def _note_end(self, request: SimulatedRequest, stages: RequestStages) -> None:
        now_s = self._events.now_s
        on_time = stages.is_published and now_s <= request.deadline_s
        self._num_missed[request.service] += not on_time
        kept = stages.is_published and stages.reason == "no_time"
        self.outcomes.append(
            SimulatedOutcome(
                request.service, request.arrival_s, now_s, _answer_of(stages), on_time, kept
            )
        )


def _begun(spec: ServiceSpec, *, is_direct: bool) -> RequestStages:
    """Return the beginning of a request; one of a cascade may skip its light model."""
    if spec.cascade is None:
        return single(spec.model)
    heavy_model = spec.cascade.heavy_model
    return single(heavy_model, "heavy") if is_direct else cascade(spec.model, _SCORER, heavy_model)


def _answer_of(stages: RequestStages) -> Answer:
    """Whose image it got."""
    if not stages.is_published:
        return "dropped"
    return "heavy" if stages.author.name == "heavy" else "light"
