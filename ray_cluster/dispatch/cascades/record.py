"""Where one request is in its cascade, and what its stages have left."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_cluster.dispatch.cascades.stages import (
    FailureKind,
    RequestStages,
    Route,
    cascade_route,
    direct_route,
)
from ray_cluster.policies.types import CascadeEntry, RequestView
from ray_cluster.protocol.leases import lane_of
from ray_cluster.protocol.outcomes import AnswerReason, CascadeAnswer, CascadeStage, StageTime
from ray_cluster.requests import (
    SMALL_SIDE_PX,
    CascadeUse,
    ImageRequest,
    ImageResult,
    SmallImage,
)

_STAGES: tuple[CascadeStage, ...] = ("light", "score", "heavy")


@dataclass(slots=True)
class CascadeRecord:
    """A request's way through a cascade; without a light stage, one model makes its image.

    Attributes:
        entered_s: instant at which the present stage began.
        made: the image of the stage that has ended, until that is taken.
        light: the light image; its bytes are empty where the result store has it.
        small: the same for the discriminator; None once it is scored.
        scored: what the discriminator has answered, until it is decided on.
        failure: why the present stage makes no image, if it does not.
        is_late: whether its deadline passed before the light image was scored.
        threshold: that its confidence was compared with.
        times: of the stages that have ended.
        num_repeated: leases of these, beyond one for each.
        shows_light: whether the light image was shown as the first preview.
    """

    use: CascadeUse
    stages: RequestStages
    entered_s: float
    made: ImageResult | None = None
    light: ImageResult | None = None
    small: SmallImage | None = None
    scored: float | None = None
    failure: FailureKind | None = None
    is_late: bool = False
    threshold: float | None = None
    times: list[StageTime] = field(default_factory=list)
    num_repeated: int = 0
    shows_light: bool = False

    @property
    def stage(self) -> CascadeStage:
        """The present stage."""
        return _STAGES[self.stages.index] if self.use.light else self.use.entry

    @property
    def is_last(self) -> bool:
        """Whether the present stage publishes what it makes."""
        return self.stages.index + 1 == len(self.stages.route.stages)

    @property
    def may_answer_light(self) -> bool:
        """Whether the light image can be published in place of a heavy one."""
        return self.stages.candidate_index is not None and self.light is not None

    def note_time(self, queue_s: float, now_s: float) -> None:
        """Note the end of the present stage."""
        took_s, name = now_s - self.entered_s, self.stages.present.model
        self.times.append(StageTime(self.stage, name, min(queue_s, took_s), took_s))
        self.entered_s = now_s

    def answer(self) -> CascadeAnswer:
        """Return how it came to the image that is published."""
        published = self.stages.published
        assert published is not None, "nothing is published yet"
        reason: AnswerReason
        match published.reason:
            case "single" | "direct":
                reason = self.use.reason
            case _:
                reason = published.reason
        stage = _STAGES[published.stage_index] if self.use.light else self.use.entry
        return CascadeAnswer(
            name=self.use.name,
            model=published.model,
            stage=stage,
            reason=reason,
            confidence=self.stages.confidence,
            threshold=self.threshold,
            stages=tuple(self.times),
        )


def cascade_record(request: ImageRequest, now_s: float) -> CascadeRecord | None:
    """Return the beginning of a request's way; None for one that names a single model."""
    use = request.cascade
    if use is None:
        return None
    return CascadeRecord(use, RequestStages(_route(use, request)), entered_s=now_s)


def _route(use: CascadeUse, request: ImageRequest) -> Route:
    if use.light is None:
        return direct_route(request.model)
    return cascade_route(use.light.model, use.light.discriminator, request.model)


def scored_view(
    request: ImageRequest, discriminator: str, *, arrival_s: float, deadline_s: float
) -> RequestView:
    """Return what policies know of a request while its light image is scored: one small step."""
    return RequestView(
        request_id=request.request_id,
        model=lane_of("score", discriminator),
        # what scoring costs does not depend on the image's size: it is made small before
        width_px=SMALL_SIDE_PX,
        height_px=SMALL_SIDE_PX,
        num_steps=1,
        uses_guidance=False,
        priority=request.priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


@dataclass(frozen=True, slots=True)
class CascadeView:
    """A cascade at one instant, for metrics.

    Attributes:
        threshold: in force; above 1 everything may be deferred.
        deferral_rate: that it gives by the latest confidences; None without any.
        drift: of these from what was calibrated, as the largest difference in deferral rate at one
            threshold; None while too little is known.
        unscored: whose images are published while no discriminator lives; None while one does.
        num_scored: real confidences since the start.
        window: the latest ones, after those of the calibration that are still in it.
    """

    name: str
    discriminator: str
    unscored: CascadeEntry | None
    threshold: float
    deferral_rate: float | None
    drift: float | None
    num_scored: int = 0
    window: tuple[float, ...] = ()

    def confidences_since(self, cursor: int) -> tuple[float, ...]:
        """Return the real confidences after the first ``cursor`` ones, as far as they are here.

        A cursor beyond them is of an earlier dispatcher: all are new.
        """
        num_new = self.num_scored - cursor if cursor <= self.num_scored else self.num_scored
        return self.window[len(self.window) - min(num_new, len(self.window)) :]
