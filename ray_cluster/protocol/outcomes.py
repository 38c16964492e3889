"""What becomes of requests, as their clients see it: outcomes, previews, progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure, ImageResult


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
class Completed:
    """The outcome of a finished request.

    Attributes:
        num_steps: denoising steps that it was made with.
        slo_s: seconds from arrival to the deadline that applied.
        elapsed_s: seconds from arrival to completion.
        attempts: leases it took.
    """

    request_id: str
    result: ImageResult
    num_steps: int
    slo_s: float
    elapsed_s: float
    attempts: int

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
    """

    position: int | None
    steps_done: int
    num_steps: int
    attempts: int
    predicted_s: float | None
    preview: Preview | None = None
