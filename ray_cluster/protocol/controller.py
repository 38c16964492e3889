"""What the controller and the dispatcher say to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ray_cluster.config.kinds import WorkerKind
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.protocol.calling.interface import raises


@dataclass(frozen=True, slots=True)
class ServiceCount:
    """Requests since the dispatcher started, in typical images; they grow until it restarts.
    What is cancelled before it is made is taken back.

    Attributes:
        name: a cascade, for the requests that it routes; a model, for those that it alone makes;
            or the lane of a ControlNet, for the denoising steps that ask for it.
        num_accepted: that were or will be made.
        num_unmet: that were refused for want of capacity, of each client no more than its share of
            what the pool may serve; none of a ControlNet.
    """

    name: str
    num_accepted: float
    num_unmet: float = 0


@dataclass(frozen=True, slots=True)
class ModelQueue:
    """One model's requests over all of its pools.

    Attributes:
        num_waiting: in the queue.
        num_leased: being made.
        safety_factor: real over predicted seconds, of the median request.
    """

    model: str
    num_waiting: int = 0
    num_leased: int = 0
    safety_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    """A live worker.

    Attributes:
        age_s: seconds since it registered.
        num_held: requests that it is leased.
        settings_version: of the settings that it has applied.
    """

    replica_id: str
    age_s: float
    num_held: int
    max_batch: int
    step_cost: StepCost
    settings_version: str = ""


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """A request of a model's default size and steps."""

    width_px: int
    height_px: int
    num_steps: int
    uses_guidance: bool

    @property
    def view(self) -> RequestView:
        """As a policy prices it."""
        return RequestView(
            request_id="",
            model="",
            width_px=self.width_px,
            height_px=self.height_px,
            num_steps=self.num_steps,
            uses_guidance=self.uses_guidance,
            priority=0,
            arrival_s=0.0,
            deadline_s=0.0,
        )


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """A pool, a discriminator or a ControlNet that has had a worker.

    Attributes:
        pool: name of its application.
        serves: name of the model, discriminator or ControlNet.
        num_cpus, num_gpus: that Ray reserves for one replica.
        load_s: seconds that the last worker took to load.
        step_cost: as the last worker registered it.
        typical: None for what makes no images.
        max_batch: bound of the settings on a plan.
        min_replicas, max_replicas: likewise.
        replicas: the live ones.
        callers: models whose replicas call it.
    """

    pool: str
    kind: WorkerKind
    serves: str
    device: Literal["cpu", "cuda"]
    num_cpus: float
    num_gpus: float
    load_s: float
    step_cost: StepCost
    typical: TypicalRequest | None
    max_batch: int
    min_replicas: int = 1
    max_replicas: int | None = None
    replicas: tuple[ObservedReplica, ...] = ()
    callers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedCascade:
    """A cascade of the settings.

    Attributes:
        curves: where its calibration is, as in the settings.
        threshold: of the settings; None where they give a deferral rate.
        deferral_rate: likewise.
        most_deferred: share of the latest confidences that the settings defer, which a plan never
            exceeds; None while none is known.
        num_scored: confidences since the dispatcher started: the next call's cursor.
        confidences: the latest since the cursor, as far as they are known.
    """

    name: str
    light: str
    heavy: str
    discriminator: str
    curves: str | None
    threshold: float | None
    deferral_rate: float | None
    reserve_s: float | None
    most_deferred: float | None = None
    num_scored: int = 0
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedLimits:
    """Settings of the controller itself; the fields of
    :class:`ray_cluster.config.sections.controller.ControlConfig`, and whether an operator has
    paused it."""

    period_s: float
    dwell_s: float
    max_actions_per_period: int
    apply_timeout_s: float
    dry_run: bool
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What the dispatcher knows of its cell at one instant.

    Attributes:
        now_s: Unix time.
        started_s: Unix time at which this dispatcher's counters began.
        default_slo_s: deadline of requests that name none.
        warnings: what is wrong though calls are answered.
        settings_version: of the document in force.
        plan: what was applied last; None before any.
        last_version: of the plan of the latest round, whoever made it; 0 before any.
    """

    now_s: float
    started_s: float
    default_slo_s: float
    services: tuple[ServiceCount, ...]
    models: tuple[ModelQueue, ...]
    pools: tuple[ObservedPool, ...]
    cascades: tuple[ObservedCascade, ...]
    limits: ObservedLimits
    warnings: tuple[str, ...] = ()
    settings_version: str = ""
    plan: PlannedSettings | None = None
    last_version: int = 0

    def num_accepted(self, name: str) -> float:
        return sum(one.num_accepted for one in self.services if one.name == name)

    def num_wanted(self, name: str) -> float:
        """Return how many requests there would be with capacity for them."""
        unmet = sum(one.num_unmet for one in self.services if one.name == name)
        return self.num_accepted(name) + unmet

    def queue(self, model: str) -> ModelQueue:
        """Return a model's queue; an unknown one's is empty."""
        return next((one for one in self.models if one.model == model), ModelQueue(model))


RoundMode = Literal["applied", "paused", "dry_run"]
"""Whether a round's plan was applied; or why not."""


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool in a round.

    Attributes:
        num_before: replicas that Ray Serve was to keep before the round.
        num_ready: live ones then.
        num_planned: replicas of the plan.
        load_per_s: images (of a ControlNet, steps) per second that it is to make, the queue
            among them.
        replica_per_s: what one replica makes at the planned cap.
        load_s: seconds until a started replica serves.
        reason: what the number follows from, in words.
    """

    pool: str
    num_before: int
    num_ready: int
    num_planned: int
    max_batch: int
    load_per_s: float = 0.0
    replica_per_s: float = 0.0
    load_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """Requests that come for a service, as estimated; None while nothing is known.

    Attributes:
        num_waiting: images in the queues of its models.
    """

    service: str
    per_s: float | None
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class HeldPool:
    """A pool that must not grow for now, as its last growth was rolled back.

    Attributes:
        num_replicas: that it may have.
        until_s: Unix time.
        num_failures: growths in a row that were rolled back.
    """

    pool: str
    num_replicas: int
    until_s: float
    num_failures: int = 1


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one round of the controller did, and why.

    Attributes:
        at_s: Unix time.
        took_s: seconds of the whole round, its calls included.
        actions: in words: what was done, or would have been.
        failures: of actions; they are tried again.
        overdue: pools whose planned replicas are not ready in time.
        rollbacks: what this round has given up of them, in words.
        held: pools that must not grow for now, after this rollback or an earlier one.
        infeasible: why demand cannot be met, if it cannot.
    """

    at_s: float
    version: int
    took_s: float
    mode: RoundMode
    pools: tuple[PlannedPool, ...] = ()
    cascades: tuple[CascadePlan, ...] = ()
    demand: tuple[ServiceDemand, ...] = ()
    actions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    infeasible: str | None = None
    rollbacks: tuple[str, ...] = ()
    held: tuple[HeldPool, ...] = ()


@dataclass(frozen=True, slots=True)
class CascadeInForce:
    """What a cascade does now.

    Attributes:
        threshold: below which images are made anew while nothing is in a hurry; above 1 all are.
        below: share of the latest confidences that are below it; None without any.
        images: how many ended since the dispatcher started, by the reason of their answers.
    """

    name: str
    threshold: float
    below: float | None
    images: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What operators are shown of the controller.

    Attributes:
        is_enabled: whether the cell has one.
        mode: what its next round does with its plan.
        silent_s: seconds without a round after which it is not counted on.
        heard_s: Unix time at which it was heard of last; None if not by this dispatcher.
        latest: its last round.
        history: rounds that changed something, the oldest first.
        num_rounds, num_actions, num_failures, num_rollbacks: since the dispatcher started.
        round_s: seconds of all these rounds.
        seats: of each group, by replica, which ranks step for which requests.
        cascades: by the settings and the plan in force.
    """

    is_enabled: bool
    mode: RoundMode = "applied"
    silent_s: float = math.inf
    heard_s: float | None = None
    latest: RoundRecord | None = None
    history: tuple[RoundRecord, ...] = ()
    num_rounds: int = 0
    num_actions: int = 0
    num_failures: int = 0
    round_s: float = 0.0
    num_rollbacks: int = 0
    seats: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    cascades: tuple[CascadeInForce, ...] = ()


class PlanCalls(Protocol):
    """Operators' way to the plan."""

    async def plan_report(self) -> PlanReport:
        """Return the plan, and what was planned before."""
        ...

    async def pause_plan(self, is_paused: bool) -> PlanReport:
        """Have plans made and not applied, or applied again; a later dispatcher knows it, too."""
        ...


class ControlCalls(Protocol):
    """The controller's way to the dispatcher; every call may raise DispatcherUnavailable."""

    @raises(DispatcherUnavailable)
    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Return the state of the cell.

        Args:
            cursors: by cascade, :attr:`ObservedCascade.num_scored` of the call before.
        """
        ...

    @raises(DispatcherUnavailable)
    async def apply_plan(self, plan: PlannedSettings) -> None:
        """Apply batch caps and thresholds, within the settings, until the next plan.

        One that is not later than the plan in force is ignored. Later dispatchers know it, too.
        """
        ...

    async def wake(self, seen: int, wait_s: float) -> int:
        """Return the number of events that call for a plan at once, once it is not ``seen``.

        A request for a model without a replica is one, and a replica that has gone.
        """
        ...

    async def note_round(self, record: RoundRecord, memory: str | None) -> None:
        """Show operators what a round did.

        Args:
            memory: the planner's, for the next controller; None leaves what is saved.
        """
        ...

    async def memory(self) -> str:
        """Return the memory that was saved last; empty without one."""
        ...
