"""What becomes of requests, as their clients see it: outcomes, previews, progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ray_cluster.policies.types import CascadeReason, EntryReason, Offer
from ray_cluster.requests import Failure, ImageResult

CascadeStage = Literal["light", "score", "heavy"]
AnswerReason = Literal[CascadeReason, EntryReason, "heavy_failed"]
"""Why a cascade's answer is of the model that it is of."""


@dataclass(frozen=True, slots=True)
class Preview:
    """An early version of an unfinished image.

    Attributes:
        index: its number, from 0, among the previews that the request may have.
        steps_done: denoising steps done, of ``num_steps``.
        data: the coded image; empty where it went to the result store.
    """

    index: int
    steps_done: int
    num_steps: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a stage of a cascade took, in seconds.

    Attributes:
        name: of the model or the discriminator.
        queue_s: until it was leased, of ``took_s``, all of it.
    """

    stage: CascadeStage
    name: str
    queue_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class CascadeAnswer:
    """How a cascade came to its answer.

    Attributes:
        name: of the cascade.
        model: whose image it is.
        stage: that made it.
        confidence: of the light image, in [0, 1]; None if none was scored.
        threshold: below which a confidence was deferred, adjusted by the request's slack; None
            where nothing was decided by one.
        stages: those that ended, in their order.
    """

    name: str
    model: str
    stage: CascadeStage
    reason: AnswerReason
    confidence: float | None = None
    threshold: float | None = None
    stages: tuple[StageTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """A light image that is not published: the heavy model makes the image anew.

    Attributes:
        threshold: as in :class:`CascadeAnswer`, like the others.
        is_stored: whether the result store has the light image.
    """

    request_id: str
    confidence: float | None
    threshold: float | None
    reason: CascadeReason
    stages: tuple[StageTime, ...] = ()
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The outcome of a finished request.

    Attributes:
        num_steps: denoising steps that it was made with.
        slo_s: seconds from arrival to the deadline that applied.
        elapsed_s: seconds from arrival to completion.
        attempts: leases it took; of a cascade one, and those that repeated an earlier one.
        cascade: how it was routed; None for a request that names a single model.
        is_candidate: whether the result store has the image under its candidate's name still.
    """

    request_id: str
    result: ImageResult
    num_steps: int
    slo_s: float
    elapsed_s: float
    attempts: int
    cascade: CascadeAnswer | None = None
    is_candidate: bool = False

    @property
    def deadline_met(self) -> bool:
        """Whether it was done in time."""
        return self.elapsed_s <= self.slo_s


Outcome = Completed | Failure


@dataclass(frozen=True, slots=True)
class Submission:
    """The dispatcher's answer to a group of requests.

    Attributes:
        outcomes: those that are there already, by request id.
    """

    offer: Offer
    outcomes: dict[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImageUpdate:
    """The next news of one request: its outcome, or a preview, or nothing yet."""

    outcome: Outcome | None = None
    preview: Preview | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is.

    Attributes:
        position: requests of its model that wait before it; None once it is leased.
        steps_done: denoising steps, of ``num_steps``.
        predicted_s: seconds until it is done, by the admission policy; None if not predicted.
        preview: the last one.
        stage: of a cascade.
    """

    position: int | None
    steps_done: int
    num_steps: int
    attempts: int
    predicted_s: float | None
    preview: Preview | None = None
    stage: CascadeStage | None = None
