"""What became of each request, and whether the service's own counts agree."""

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
from benchmarks.serving.compare.traces import Planned
from benchmarks.serving.contenders import Counts

# only the first is no miss; a dropped one was accepted, and given up as it could not be in time
Fate = Literal["in time", "late", "degraded", "refused", "dropped", "failed", "lost"]
FATES: tuple[Fate, ...] = get_args(Fate)
_FINISHED: tuple[Fate, ...] = ("in time", "late", "degraded")
DROPPED_CODE = "deadline_missed"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What became of one request.

    Attributes:
        latency_s: from the planned instant to its answer; None without one.
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


def outcome_of(planned: Planned, answer: Answer) -> CallOutcome:
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
    if size != (planned.shape.width_px, planned.shape.height_px):
        return CallOutcome("failed", latency_s, problem=f"{size} for {planned.shape.size}")
    if num_steps < planned.shape.num_steps:
        return CallOutcome("degraded", latency_s, png)
    return CallOutcome("in time" if latency_s <= planned.slo_s else "late", latency_s, png)


def figures_of(outcomes: Sequence[CallOutcome]) -> dict[str, Any]:
    """Return the figures of one run; its ``requests`` are pairs of a fate's number and seconds."""
    fates = Counter(one.fate for one in outcomes)
    return {
        "attainment": fates["in time"] / len(outcomes),
        "fates": {fate: fates[fate] for fate in FATES},
        "problems": dict(Counter(one.problem[:160] for one in outcomes if one.problem)),
        "requests": [
            [FATES.index(one.fate), None if one.latency_s is None else round(one.latency_s, 4)]
            for one in outcomes
        ],
    }


def latencies_s(figures: Mapping[str, Any]) -> list[float]:
    """Return the seconds to the images of a run, given its :func:`figures_of`."""
    finished = [FATES.index(fate) for fate in _FINISHED]
    return [latency_s for fate, latency_s in figures["requests"] if fate in finished]


def account(outcomes: Sequence[CallOutcome], counts: Counts) -> dict[str, Any]:
    """Return whether no accepted request was lost, by what the client saw and the service counts.

    Args:
        counts: the service's, of the same requests.
    """
    seen = Counter(one.fate for one in outcomes)
    rows = {
        "accepted": (len(outcomes) - seen["refused"], counts.accepted),
        "finished": (sum(seen[fate] for fate in _FINISHED), counts.completed),
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
