"""How far accepted requests are, and when they will be done, for who asks.

Anybody may ask for many of theirs, and often. So what was found out of a model's requests answers
for a while, one call finds out no more than a bounded part of it anew, and says of the rest what
was predicted when it was accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.policies.admission.admission import predict_s
from ray_cluster.policies.admission.forecast import forecast_s
from ray_cluster.protocol.outcomes import Progress

Predicts = Literal["anew", "known", "no"]
"""Whether ends are predicted: within bounds now, from what was found out before, or not at all."""

# age at which a model's forecast is made anew
_FRESH_S = 0.25
# models whose forecasts one call makes, and requests that it predicts one by one beside them
_MOST_FORECASTS, _MOST_PREDICTIONS = 1, 40


@dataclass(frozen=True, slots=True)
class _Forecast:
    """Instants at which the requests of a model end, by a simulation of its replicas."""

    made_s: float
    ends_s: Mapping[str, float]


class Predictions:
    """Answers for the records of a ledger."""

    def __init__(self, ledger: Ledger, queue: AdmissionView) -> None:
        self._ledger = ledger
        self._queue = queue
        self._forecasts: dict[str, _Forecast] = {}

    def progress(
        self, request_ids: Iterable[str], now_s: float, *, predicts: Predicts
    ) -> Iterator[Progress | None]:
        """Yield how far requests are; None for one that has ended or was never accepted.

        Args:
            predicts: their ends as well, where their models have replicas.
        """
        answer = _Answer(self._ledger, self._queue, self._forecasts, now_s, predicts)
        for request_id in request_ids:
            record = self._ledger.get(request_id)
            if record is None:
                yield None
                continue
            view, waits = record.view, record.holder is None
            yield Progress(
                position=self._ledger.queue.position(view) if waits else None,
                steps_done=view.steps_done,
                num_steps=view.num_steps,
                attempts=record.attempts,
                predicted_s=answer.predicted_s(record),
                preview=record.preview,
                stage=record.stages.present.name,
            )


class _Answer:
    """One call's predictions."""

    def __init__(
        self,
        ledger: Ledger,
        queue: AdmissionView,
        forecasts: dict[str, _Forecast],
        now_s: float,
        predicts: Predicts,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._forecasts = forecasts
        self._now_s = now_s
        self._predicts = predicts
        is_anew = predicts == "anew"
        self._forecasts_left = _MOST_FORECASTS if is_anew else 0
        self._predictions_left = _MOST_PREDICTIONS if is_anew else 0
        # models that are too large to simulate
        self._fluid: set[str] = set()

    def predicted_s(self, record: RequestRecord) -> float | None:
        view = record.view
        if self._predicts == "no" or self._queue.pool(view.model) is None:
            return None
        found_s = self._by_forecast(record)
        if found_s is None and self._predictions_left > 0:
            self._predictions_left -= 1
            found_s = predict_s([view], self._queue, self._now_s, is_simulated=False)
        if found_s is None:
            found_s = max(0.0, view.arrival_s + record.predicted_s - self._now_s)
        if record.holder is None and view.request_id not in self._ledger.queue:
            found_s += self._ledger.waiting.wait_s([record.request], self._now_s)
        return found_s

    def _by_forecast(self, record: RequestRecord) -> float | None:
        """Return the seconds by a forecast; None where there is none of the request."""
        view, now_s = record.view, self._now_s
        if view.model in self._fluid:
            return None
        known = self._forecasts.get(view.model)
        if (known is None or now_s >= known.made_s + _FRESH_S) and self._forecasts_left:
            simulated = self._queue.forecast_view([view], now_s)
            if simulated is None:
                self._forecasts.pop(view.model, None)
                self._fluid.add(view.model)
                return None
            self._forecasts_left -= 1
            ends_s = {one: now_s + end_s for one, end_s in forecast_s(simulated).items()}
            known = self._forecasts[view.model] = _Forecast(now_s, ends_s)
        end_s = None if known is None else known.ends_s.get(view.request_id)
        return None if end_s is None else max(0.0, end_s - now_s)
