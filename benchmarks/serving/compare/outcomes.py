"""What became of each request, and whether the service's own books agree."""

from __future__ import annotations

import binascii
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, get_args

from PIL import Image, UnidentifiedImageError

from benchmarks.serving.compare.client import Answer
from benchmarks.serving.compare.contenders import Counts
from benchmarks.serving.compare.traces import Planned
from benchmarks.stats import percentile

# only the first is no miss. `dropped`: let in, and given up before work, as it could not be in time
Fate = Literal["in time", "late", "degraded", "refused", "dropped", "failed", "lost"]
FATES: tuple[Fate, ...] = get_args(Fate)
_FINISHED: tuple[Fate, ...] = ("in time", "late", "degraded")
_PERCENTS = (50, 95, 99)
DROPPED_CODE = "deadline_missed"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What became of one request.

    Attributes:
        latency_s: from the instant it was planned for to its answer; None without one.
        png: the image, empty without one.
        problem: what is wrong with a failed or lost one.
    """

    fate: Fate
    latency_s: float | None
    png: bytes = b""
    problem: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether an image came."""
        return self.fate in _FINISHED


def outcome_of(asked: Planned, answer: Answer) -> CallOutcome:
    """Return what became of a request."""
    latency_s = answer.latency_s
    if answer.status is None or latency_s is None:
        return CallOutcome("lost", None, problem=answer.problem)
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
        return CallOutcome("refused", latency_s)
    if answer.status != HTTPStatus.OK:
        if DROPPED_CODE in answer.body.decode(errors="replace"):
            return CallOutcome("dropped", latency_s)
        words = answer.body[:200].decode(errors="replace")
        return CallOutcome("failed", latency_s, problem=f"status {answer.status}: {words}")
    try:
        image = json.loads(answer.body)["data"][0]
        png = binascii.a2b_base64(image["b64_json"])
        size = Image.open(io.BytesIO(png)).size
        num_steps = int(image["num_inference_steps"])
    except (ValueError, LookupError, TypeError, UnidentifiedImageError) as error:
        return CallOutcome(
            "failed", latency_s, problem=f"no image: {type(error).__name__}: {error}"
        )
    if size != (asked.shape.width_px, asked.shape.height_px):
        return CallOutcome("failed", latency_s, problem=f"{size} for {asked.shape.size}")
    if num_steps < asked.shape.num_steps:
        return CallOutcome("degraded", latency_s, png)
    return CallOutcome("in time" if latency_s <= asked.slo_s else "late", latency_s, png)


def figures_of(asked: Sequence[Planned], outcomes: Sequence[CallOutcome]) -> dict[str, Any]:
    """Return the figures of one run, every request in them."""
    fates = Counter(one.fate for one in outcomes)
    finished = [one.latency_s for one in outcomes if one.is_finished and one.latency_s is not None]
    by_size: dict[str, list[bool]] = {}
    for request, outcome in zip(asked, outcomes, strict=True):
        by_size.setdefault(request.shape.size, []).append(outcome.fate == "in time")
    return {
        "attainment": fates["in time"] / len(outcomes),
        "attainment_by_size": {size: sum(met) / len(met) for size, met in sorted(by_size.items())},
        "fates": {fate: fates[fate] for fate in FATES},
        "latency_s": {
            f"p{percent}": round(percentile(finished, percent), 4) if finished else None
            for percent in _PERCENTS
        },
        "problems": dict(Counter(one.problem[:160] for one in outcomes if one.problem)),
        "requests": [
            [FATES.index(one.fate), None if one.latency_s is None else round(one.latency_s, 4)]
            for one in outcomes
        ],
    }


def made_latencies_s(figures: Mapping[str, Any]) -> list[float]:
    """Return the seconds to the images of a run, of its :func:`figures_of`."""
    made = [FATES.index(fate) for fate in _FINISHED]
    return [latency_s for fate, latency_s in figures["requests"] if fate in made]


def account(outcomes: Sequence[CallOutcome], counts: Counts) -> dict[str, Any]:
    """Return whether nothing that was let in was lost, by both sides' books.

    Args:
        outcomes: as the client saw them.
        counts: of the same requests, as the service says.
    """
    seen = Counter(one.fate for one in outcomes)
    finished = sum(seen[fate] for fate in _FINISHED)
    accepted = len(outcomes) - seen["refused"]
    rows = {
        "accepted": (accepted, counts.accepted),
        "finished": (finished, counts.completed),
        "dropped": (seen["dropped"], counts.dropped),
        "failed": (seen["failed"], counts.failed),
        "lost": (seen["lost"], counts.open),
    }
    # none has an open end, and both have seen the same
    nothing_lost = not seen["lost"] and all(client == service for client, service in rows.values())
    return {
        "client_and_service": {name: list(row) for name, row in rows.items()},
        "nothing_lost": nothing_lost,
    }
