"""``/v1/plan``: shows the controller's plan, and pauses the controller; and its JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, Field

from ray_cluster.api.errors import ApiError, not_found
from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.protocol.cell_view import shown_id
from ray_cluster.protocol.controller import HeldPool, PlanCalls, PlanReport, RoundRecord

PlanState = Literal["applied", "paused", "dry_run", "starting", "silent"]


class PlanEndpoint:
    """The plan, for operators.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, client: PlanCalls, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock

    async def show(self) -> PlanResponse:
        """Show the plan: replicas, batch caps and thresholds, why, and what was changed before."""
        return self._reply(await self._client.plan_report())

    async def pause(self) -> PlanResponse:
        """Pause the controller: it plans and changes nothing, until it is resumed."""
        await self.show()
        return self._reply(await self._client.pause_plan(True))

    async def resume(self) -> PlanResponse:
        """Let the controller apply its plans again."""
        await self.show()
        return self._reply(await self._client.pause_plan(False))

    def _reply(self, report: PlanReport) -> PlanResponse:
        if not report.is_enabled:
            raise _no_controller()
        return plan_reply(report, self._clock())


def _no_controller() -> ApiError:
    return not_found(
        "This service has no controller, and so no plan. The operator can set control.enabled in "
        "its configuration.",
        "no_controller",
        "plan",
    )


class PlannedPoolCard(BaseModel):
    """A pool in a plan, and why it has so many replicas."""

    pool: str = Field(description="Name of the Serve application.")
    num_before: int = Field(description="Replicas that Ray Serve was to keep before the round.")
    num_ready: int = Field(description="Live ones then.")
    num_planned: int = Field(description="Replicas of the plan.")
    max_batch: int = Field(description="Images that a replica steps together at most.")
    load_per_s: float = Field(
        description="Images per second that it is to make, the queue among them; steps, of a "
        "ControlNet."
    )
    replica_per_s: float = Field(description="What one replica makes at that cap.")
    load_s: float = Field(description="Seconds until a started replica serves.")
    reason: str = Field(description="What the number follows from.")


class PlannedCascadeCard(BaseModel):
    """A cascade in a plan."""

    service: str = Field(description="Name of the cascade.")
    threshold: float | None = Field(
        description="Confidence below which images are made anew, if the settings allow as many; "
        "null for all that they allow."
    )
    idle_threshold: float | None = Field(
        description="Likewise for an image for which the heavy model stands idle."
    )
    deferral_rate: float = Field(description="Share of the images that `threshold` is to give.")


class DemandCard(BaseModel):
    """Calls for a model or a cascade."""

    service: str = Field(description="The model or cascade.")
    per_s: float | None = Field(description="Estimated images per second; null while unknown.")
    num_waiting: int = Field(description="Images that wait for its models.")


class HeldPoolCard(BaseModel):
    """A pool that must not grow for now."""

    pool: str = Field(description="Name of the Serve application.")
    num_replicas: int = Field(description="Replicas that it may have.")
    until: float = Field(description="Unix time in seconds from which more are tried again.")
    num_failures: int = Field(description="Growths in a row that were rolled back.")


class RoundCard(BaseModel):
    """A round of the controller."""

    at: float = Field(description="Unix time in seconds.")
    version: int = Field(description="Of the plan; rises with every plan that differs.")
    mode: Literal["applied", "paused", "dry_run"] = Field(
        description="Whether the plan was applied, or only made."
    )
    took_s: float = Field(description="Seconds of the round.")
    actions: list[str] = Field(description="What was done, or would have been.")
    failures: list[str] = Field(description="What of this failed; it is tried again.")
    overdue: list[str] = Field(description="Pools whose planned replicas are not ready in time.")
    rollbacks: list[str] = Field(description="What of this was given up in this round.")
    held: list[HeldPoolCard] = Field(
        description="Pools that must not grow for now, as their last growth was rolled back."
    )
    infeasible: str | None = Field(description="Why the demand cannot be met, if it cannot.")
    demand: list[DemandCard]
    pools: list[PlannedPoolCard]
    cascades: list[PlannedCascadeCard]


class CascadeCard(BaseModel):
    """What a cascade does now."""

    service: str = Field(description="Name of the cascade.")
    threshold: float | None = Field(
        description="Confidence below which images are made anew, by the settings and the plan; "
        "null for all."
    )
    below: float | None = Field(
        description="Share of the latest confidences that are below it; null while there are none."
    )
    images: dict[str, int] = Field(
        description="Images since the dispatcher started, by the reason of their answers, as in "
        "replies: `confident`, `deferred`, `no_time`, ..."
    )


class GroupCard(BaseModel):
    """Who runs where in a group."""

    replica: str = Field(description="Its head.")
    ranks: dict[str, list[int]] = Field(
        description="By the beginning of an image's id, the ranks of its present step."
    )


class PlanResponse(BaseModel):
    """The controller's plan, and the rounds that changed something."""

    object: Literal["plan"] = "plan"
    state: PlanState = Field(
        description="`applied`: plans are made and applied; `paused`, `dry_run`: only made; "
        "`starting`: none yet; `silent`: the controller has not been heard of for 20 s or four "
        "periods. The last plan stays in force meanwhile."
    )
    heard_at: float | None = Field(description="Unix time of the last round; null before one.")
    latest: RoundCard | None = Field(description="The last round.")
    history: list[RoundCard] = Field(description="Rounds that changed something, newest first.")
    cascades: list[CascadeCard] = Field(description="What they do now, and what they have done.")
    groups: list[GroupCard] = Field(description="Groups of ranks, some two seconds ago at most.")


def plan_reply(report: PlanReport, now_s: float) -> PlanResponse:
    """Return a report as the API shows it."""
    return PlanResponse(
        state=_state_of(report, now_s),
        heard_at=report.heard_s,
        latest=None if report.latest is None else _round(report.latest),
        history=[_round(one) for one in reversed(report.history)],
        cascades=[
            CascadeCard(
                service=one.name,
                threshold=one.threshold if one.threshold <= 1 else None,
                below=one.below,
                images=dict(one.images),
            )
            for one in report.cascades
        ],
        groups=[
            GroupCard(replica=one, ranks={shown_id(k): list(v) for k, v in seats.items()})
            for one, seats in sorted(report.seats.items())
        ],
    )


def _state_of(report: PlanReport, now_s: float) -> PlanState:
    if report.latest is None or report.heard_s is None:
        return "starting"
    if now_s - report.heard_s > report.silent_s:
        return "silent"
    return report.mode


def _round(record: RoundRecord) -> RoundCard:
    def held(one: HeldPool) -> HeldPoolCard:
        fields = asdict(one)
        return HeldPoolCard(until=fields.pop("until_s"), **fields)

    return RoundCard(
        at=record.at_s,
        version=record.version,
        mode=record.mode,
        took_s=record.took_s,
        actions=list(record.actions),
        failures=list(record.failures),
        overdue=list(record.overdue),
        rollbacks=list(record.rollbacks),
        held=[held(one) for one in record.held],
        infeasible=record.infeasible,
        demand=[DemandCard(**asdict(one)) for one in record.demand],
        pools=[PlannedPoolCard(**asdict(one)) for one in record.pools],
        cascades=[_cascade_card(one) for one in record.cascades],
    )


def _cascade_card(cascade: CascadePlan) -> PlannedCascadeCard:
    idle = cascade.threshold if cascade.idle_threshold is None else cascade.idle_threshold
    # above 1 all of them are below it, and JSON has no infinity
    threshold, idle_threshold = (
        one if one <= 1 else None for one in (cascade.threshold, max(cascade.threshold, idle))
    )
    return PlannedCascadeCard(
        service=cascade.service,
        threshold=threshold,
        idle_threshold=idle_threshold,
        deferral_rate=cascade.deferral_rate,
    )
