"""The stages of a request, as a pure state machine: which comes next, and what is published.

A request follows a route. Most routes have one stage. In a cascade the light model makes an image,
a scorer gives it a confidence, and the heavy model makes the image anew if that is too low
(DiffServe, section 3.1). A request that the light model cannot serve goes to the heavy one at once.

::

    denoise ──finish_image──▶ score ──decide──▶ denoise ──finish_image──▶ published
       │                        │                  │ └──fail──▶ published: the light image
       └──fail──▶ failed        └──decide──▶ published: the light image

Nothing is decided here: :mod:`ray_cluster.policies.cascade` says whether an image is deferred, and
whether the light one answers for a heavy one that failed. A state is plain data: a job's row can
hold it, and a later dispatcher goes on at the same stage. Every function returns the next state,
and raises ValueError for what cannot happen in the present one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ray_cluster.policies.cascade import CascadeDecision
from ray_cluster.policies.types import CascadeReason

StageKind = Literal["denoise", "score"]
RouteKind = Literal["single", "cascade", "direct"]
Handover = Literal["nothing", "pixels"]
FailureKind = Literal["error", "invalid", "aborted", "lost", "too_late"]
PublishReason = Literal[CascadeReason, "single", "direct", "heavy_failed"]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a route.

    Attributes:
        model: whose replicas do it.
        leaves: for the next stage. A stage that leaves pixels also leaves an encoded candidate,
            which is published if no later image is.
    """

    model: str
    kind: StageKind
    leaves: Handover = "nothing"


@dataclass(frozen=True, slots=True)
class Route:
    """The stages that a request may go through; fixed when the request is accepted.

    Attributes:
        kind: ``single`` for a model without a cascade, ``direct`` for the heavy model of one.
    """

    kind: RouteKind
    stages: tuple[StageSpec, ...]

    def __post_init__(self) -> None:
        kinds = tuple(one.kind for one in self.stages)
        allowed = ("denoise", "score", "denoise") if self.kind == "cascade" else ("denoise",)
        if kinds != allowed:
            raise ValueError(f"the stages of a {self.kind} route are {allowed}; given {kinds}")


def single_route(model: str) -> Route:
    """Return the route of a request for one model."""
    return Route("single", (StageSpec(model, "denoise"),))


def cascade_route(light_model: str, scorer: str, heavy_model: str) -> Route:
    """Return the route through a cascade."""
    light = StageSpec(light_model, "denoise", leaves="pixels")
    return Route("cascade", (light, StageSpec(scorer, "score"), StageSpec(heavy_model, "denoise")))


def direct_route(heavy_model: str) -> Route:
    """Return the route of a request that skips the light model of a cascade."""
    return Route("direct", (StageSpec(heavy_model, "denoise"),))


@dataclass(frozen=True, slots=True)
class Publication:
    """The image that a request got.

    Attributes:
        stage_index: of the stage that made it.
        reason: the decision on the light image, or the kind of route, or ``heavy_failed`` for a
            light image in place of a heavy one.
    """

    stage_index: int
    model: str
    reason: PublishReason


@dataclass(frozen=True, slots=True)
class RequestStages:
    """Where a request stands on its route.

    Attributes:
        index: of the present stage; after the end, of the last one that began.
        confidence: of the light image; None until it is scored, and if it could not be.
        decided: why the light image is deferred or published; None until then.
        published: the image, if the request ended with one.
        failure: why the request ended without an image, if it did.
    """

    route: Route
    index: int = 0
    confidence: float | None = None
    decided: CascadeReason | None = None
    published: Publication | None = None
    failure: FailureKind | None = None

    @property
    def present(self) -> StageSpec:
        return self.route.stages[self.index]

    @property
    def has_ended(self) -> bool:
        """Whether there is an image or a failure; nothing changes after that."""
        return self.published is not None or self.failure is not None

    @property
    def candidate_index(self) -> int | None:
        """Stage of the light image that may be published now; None before it is decided on."""
        return None if self.decided is None else 0


def finish_image(stages: RequestStages, index: int) -> RequestStages:
    """Finish a denoise stage: go on to the next, or publish the image of the last."""
    _check(stages, index, "denoise")
    if index + 1 < len(stages.route.stages):
        return replace(stages, index=index + 1)
    return _publish(stages, index, stages.decided or _route_reason(stages.route))


def decide(
    stages: RequestStages, index: int, decision: CascadeDecision, confidence: float | None
) -> RequestStages:
    """Apply the decision on a scored light image: go on, or publish that image.

    Args:
        confidence: in [0, 1]; None if it could not be scored.
    """
    _check(stages, index, "score")
    if confidence is not None and not 0 <= confidence <= 1:
        raise ValueError(f"a confidence lies in [0, 1]; given {confidence}")
    decided = replace(stages, confidence=confidence, decided=decision.reason)
    if decision.is_deferred:
        return replace(decided, index=index + 1)
    return _publish(decided, index - 1, decision.reason)


def fail(
    stages: RequestStages, index: int, kind: FailureKind, *, keeps_light: bool
) -> RequestStages:
    """End the request: the present stage makes no image. The light image may answer.

    A scorer that fails is no failure of the request: see :func:`decide` without a confidence.

    Args:
        keeps_light: whether the light image answers for a failed heavy one; an aborted request gets
            none.
    """
    _check(stages, index, None if kind == "aborted" else "denoise")
    candidate = stages.candidate_index
    if candidate is None or not keeps_light or kind == "aborted":
        return replace(stages, failure=kind)
    return _publish(stages, candidate, "no_time" if kind == "too_late" else "heavy_failed")


def _publish(stages: RequestStages, index: int, reason: PublishReason) -> RequestStages:
    model = stages.route.stages[index].model
    return replace(stages, published=Publication(index, model, reason))


def _route_reason(route: Route) -> PublishReason:
    return "direct" if route.kind == "direct" else "single"


def _check(stages: RequestStages, index: int, kind: StageKind | None) -> None:
    """Raise ValueError unless the event is one of the present stage; None allows every kind."""
    if stages.has_ended:
        ended = stages.failure or stages.published
        raise ValueError(f"the request has ended ({ended}); stage {index} has nothing to report")
    if index != stages.index:
        raise ValueError(f"only the present stage, {stages.index}, can report; given {index}")
    if kind is not None and kind != stages.present.kind:
        raise ValueError(f"stage {index} must be a {kind} stage for that; it is {stages.present}")


def stage_id(request_id: str, stage_index: int) -> str:
    """Return an id of one stage of a request, for those who queue stages as requests."""
    return request_id if stage_index == 0 else f"{request_id}.{stage_index}"
