"""What predictions rest on: learnt from who is let in and from what has ended, model by model."""

from __future__ import annotations

from collections import Counter

from ray_cluster.dispatch.state import RequestRecord
from ray_cluster.policies.cost_model import decode_s
from ray_cluster.policies.inflow import Inflow, observe_arrivals
from ray_cluster.policies.prediction_error import PredictionError, observe_end
from ray_cluster.policies.stage_times import StageTimes, observe_stages
from ray_cluster.policies.types import RequestView
from ray_cluster.requests import Timing


class PredictionStats:
    """Keeps what was learnt of every model."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, bool], PredictionError] = {}
        self._inflows: dict[str, Inflow] = {}
        self._stages: dict[str, StageTimes] = {}
        self._num_ended: Counter[tuple[str, bool]] = Counter()

    def allowance(self, model: str, *, is_followed: bool) -> float:
        """Return by what a prediction is to be multiplied so that it is probably kept.

        Args:
            model: whose requests.
            is_followed: how it is predicted, see :class:`ray_cluster.policies.types.Offer`.
        """
        return self.error(model, is_followed=is_followed).allowance

    def error(self, model: str, *, is_followed: bool) -> PredictionError:
        """Return how far off predictions of a kind were."""
        return self._errors.get((model, is_followed), PredictionError())

    def num_ended(self, model: str, *, is_followed: bool) -> int:
        """Return how many ends there were of what was predicted so."""
        return self._num_ended[model, is_followed]

    def inflow(self, model: str) -> Inflow:
        """Return what was let in of late."""
        return self._inflows.get(model, Inflow())

    def stages(self, model: str) -> StageTimes:
        """Return what requests take beside their steps."""
        return self._stages.get(model, StageTimes())

    def let_in(self, view: RequestView) -> None:
        """Take in a request that is let in."""
        self._inflows[view.model] = observe_arrivals(self.inflow(view.model), [view])

    def ended(self, record: RequestRecord, timing: Timing, took_s: float) -> None:
        """Compare the prediction that a request was let in with, and look at its stages.

        Args:
            record: of the request; its replica has it still.
            timing: as the replica tells it; without steps it tells nothing.
            took_s: seconds from its arrival.
        """
        model, way = record.view.model, (record.view.model, record.is_followed)
        error = self.error(model, is_followed=record.is_followed)
        self._errors[way] = observe_end(error, predicted_s=record.predicted_s, took_s=took_s)
        self._num_ended[way] += 1
        if record.holder is None or record.num_leases > 1 or timing.denoise_s <= 0:
            return
        known_s = timing.queue_s + timing.encode_s + timing.denoise_s
        rest_s = took_s - known_s - decode_s(record.holder.step_cost, record.view)
        self._stages[model] = observe_stages(
            self.stages(model), encode_s=timing.encode_s, rest_s=rest_s
        )
