"""What the dispatcher counts: estimates that predictions rest on, and outcomes for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace

from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.policies.admission.estimates import (
    Arrivals,
    PredictionError,
    StageTimes,
    faded_error,
    observe_arrivals,
    observe_end,
    observe_stages,
)
from ray_cluster.policies.costs.cost_model import decode_s
from ray_cluster.policies.types import Offer, RequestView
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import ImageRequest, Timing

# real over predicted seconds: within 10 % and 25 % stand on both sides of 1
RATIO_BOUNDS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
SECOND_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# failures that say nothing of the service: clients cancelled these, or asked wrongly
CALLERS_OWN = frozenset({"aborted", "invalid"})
# why a light model's image was published though a heavy one was to make it anew
_UNFINISHED = frozenset({"no_time", "heavy_failed"})
_OTHER = "other"


class PredictionStats:
    """Per-model arrivals, stage times and prediction errors."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, bool], PredictionError] = {}
        # when the last of these requests ended, and the seconds that it took
        self._last_ends: dict[tuple[str, bool], tuple[float, float]] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._stages: dict[str, StageTimes] = {}

    def safety_factor(self, model: str, now_s: float, *, is_simulated: bool) -> float:
        """Return the factor for a predicted latency, by the way it is predicted."""
        error = self._error(model, is_simulated)
        ended_s, took_s = self._last_ends.get((model, is_simulated), (now_s, 0.0))
        return faded_error(error, now_s - ended_s, took_s=took_s).safety_factor

    def _error(self, model: str, is_simulated: bool) -> PredictionError:
        return self._errors.get((model, is_simulated), PredictionError())

    def arrivals(self, model: str) -> Arrivals:
        return self._arrivals.get(model, Arrivals())

    def stages(self, model: str) -> StageTimes:
        return self._stages.get(model, StageTimes())

    def note_accepted(self, view: RequestView) -> None:
        self._arrivals[view.model] = observe_arrivals(self.arrivals(view.model), [view])

    def note_end(self, record: RequestRecord, timing: Timing, took_s: float, now_s: float) -> None:
        """Compare a request's end with its prediction, and observe its stages.

        Args:
            record: its replica still holds it.
            timing: the replica's; without steps it says nothing.
            took_s: seconds from its arrival.
        """
        model, is_simulated = record.view.model, record.is_simulated
        error = self._error(model, is_simulated)
        self._errors[model, is_simulated] = observe_end(
            error, predicted_s=record.predicted_s, took_s=took_s
        )
        self._last_ends[model, is_simulated] = now_s, took_s
        if record.holder is None or record.num_leases > 1 or timing.denoise_s <= 0:
            return
        known_s = timing.queue_s + timing.encode_s + timing.denoise_s
        rest_s = took_s - known_s - decode_s(record.holder.step_cost, record.view)
        self._stages[model] = observe_stages(
            self.stages(model), encode_s=timing.encode_s, rest_s=rest_s
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values.

    Attributes:
        counts: of those up to each bound, and of those above; not cumulative; empty without any.
        total: of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()
    total: float = 0.0

    def plus(self, value: float) -> Histogram:
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        return replace(self, counts=tuple(counts), total=self.total + value)


def size_class(size_px: tuple[int, int]) -> str:
    """Return the side, a power of two, of the smallest square with at least so many pixels."""
    side = 1
    while side * side < size_px[0] * size_px[1]:
        side *= 2
    return str(side)


@dataclass(slots=True)
class OutcomeCounters:
    """Counts of a cell's requests for metrics; a model is what a call names, or a cascade.

    Attributes:
        totals: events by name: accepted, refused, completed, missed (completed after their
            deadline), error, aborted, lost, requeued, preempted and so on.
        refused: images by model and reason.
        met: images that ended by their deadlines, by model and class of the model's size.
        unfinished: those of a cascade that did, of a light model whose image was to be made anew.
        missed: those that ended later or not at all, except ends of ``CALLERS_OWN``.
        made: images by the model that made them and the fidelity that they got; ``unknown`` where
            nothing is known of so few steps.
        ratios: real over predicted seconds, by the queue of the stage.
        answered: images of cascades, by cascade, the stage that made them and the reason.
        stages: seconds of the stages that have ended, by model and stage.
    """

    totals: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    unfinished: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    made: Counter[tuple[str, str]] = field(default_factory=Counter)
    ratios: dict[str, Histogram] = field(default_factory=dict)
    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    stages: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def copy(self) -> OutcomeCounters:
        """Return the counts as they are now."""
        return OutcomeCounters(*(copy(getattr(self, one.name)) for one in fields(self)))

    def note_refused(self, group: Sequence[ImageRequest], offer: Offer) -> None:
        self.totals["refused"] += len(group)
        if group:
            # clients can ask for any name: that must not become a label each
            model = _OTHER if offer.reason == "unknown_model" else group[0].called_model
            self.refused[model, str(offer.reason)] += len(group)

    def note_end(self, request: ImageRequest, outcome: Outcome) -> None:
        ends = self.missed
        if isinstance(outcome, Completed) and outcome.deadline_met:
            reason = None if outcome.cascade is None else outcome.cascade.reason
            ends = self.unfinished if reason in _UNFINISHED else self.met
        ends[request.called_model, size_class(request.size_px)] += 1

    def note_stage(self, model: str, stage: str, took_s: float) -> None:
        known = self.stages.get((model, stage), Histogram(SECOND_BOUNDS))
        self.stages[model, stage] = known.plus(took_s)

    def note_ratio(self, model: str, *, took_s: float, predicted_s: float) -> None:
        """Count how far off a prediction was, if there was one."""
        if predicted_s > 0:
            known = self.ratios.get(model, Histogram(RATIO_BOUNDS))
            self.ratios[model] = known.plus(took_s / predicted_s)
