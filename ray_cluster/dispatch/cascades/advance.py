"""What follows on a stage that has ended, in cascades by the policies.

An image that was scored is good enough, or the heavy model makes it anew (DiffServe, section 3).
Later stages are queued however many wait: the request was accepted.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ray_cluster.config.settings import CascadeSettings
from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.due import AT_ONCE
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.dispatch.reports.log import log_image
from ray_cluster.dispatch.reports.snapshots import CascadeView
from ray_cluster.dispatch.stages import Specs, StageEnd, decide, fail, least_left, view_in
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.observability.logs import LogFields
from ray_cluster.policies.admission.admission import predict_s
from ray_cluster.policies.cascade import (
    NO_HURRY,
    CascadeDecision,
    ConfidenceWindow,
    DeferralCurve,
    Slack,
    decide_deferral,
    decide_unscored,
    deferral_rate,
    drift,
    given_up_s,
    needs_slack,
    observe,
    request_threshold,
    threshold_for,
    window_from,
)
from ray_cluster.policies.costs.cost_model import alone_s
from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.policies.types import CascadeReason, RequestView
from ray_cluster.protocol.controller import CascadeInForce
from ray_cluster.protocol.leases import lane_of
from ray_cluster.protocol.outcomes import Deferred, Preview
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)

# while a deferral rate is wanted and nothing is known of confidences
_FIRST_THRESHOLD = 0.5
CurveOf = Callable[[CascadeSettings], DeferralCurve | None]
"""Returns what a cascade's confidences were calibrated to; None where nobody knows."""


@dataclass(slots=True)
class _Cascade:
    """A cascade of the settings.

    Attributes:
        curve: that was calibrated.
        window: its latest confidences; None while there are none.
        num_scored: real confidences so far, also those that the window has no more.
    """

    config: CascadeSettings
    curve: DeferralCurve | None
    window: ConfidenceWindow | None
    num_scored: int = 0

    @property
    def plan(self) -> CascadePlan:
        """Threshold and slack by the settings and the latest confidences."""
        config, threshold, idle = self.config, self.config.threshold, self.config.idle_threshold
        if threshold is None:
            threshold = self._threshold_for(config.deferral_rate or 0.0)
        if idle is not None and config.idle_deferral_rate is not None:
            idle = min(idle, self._threshold_for(config.idle_deferral_rate))
        return CascadePlan(config.name, threshold, reserve_s=config.reserve_s, idle_threshold=idle)

    def _threshold_for(self, rate: float) -> float:
        return _FIRST_THRESHOLD if self.window is None else threshold_for(self.window, rate)

    def observe(self, confidence: float) -> None:
        """Count a confidence."""
        if self.window is None:
            self.window = ConfidenceWindow((confidence,), self.config.window)
        else:
            self.window = observe(self.window, [confidence])
        self.num_scored += 1


class Cascades:
    """Takes requests from stage to stage; the ledger holds them, and ends them.

    Args:
        curve_of: called once for each cascade of new settings.

    Attributes:
        is_behind: whether :meth:`watch` has more to do at once.
    """

    def __init__(
        self,
        ledger: Ledger,
        replicas: Replicas,
        queue: AdmissionView,
        curve_of: CurveOf = lambda _config: None,
    ) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._queue = queue
        self._curve_of = curve_of
        self._cascades: dict[str, _Cascade] = {}
        self.is_behind = False
        self._offered: list[str] = []
        self._deferred: list[Deferred] = []

    def apply(self, configs: Sequence[CascadeSettings]) -> None:
        """Apply other settings; confidences are kept. Requests keep the stages they began with."""
        # by a removed one, requests of before are still decided
        self._offered = [config.name for config in configs]
        for config in configs:
            known = self._cascades.get(config.name)
            if known is not None and _is_same(known.config, config):
                known.config = config
                continue
            curve = self._curve_of(config)
            window = None if curve is None else window_from(curve, config.window)
            self._cascades[config.name] = _Cascade(config, curve, window)

    def views(self) -> tuple[CascadeView, ...]:
        """Return the cascades in the settings as they are now."""
        return tuple(self._view(self._cascades[name]) for name in self._offered)

    def _view(self, cascade: _Cascade) -> CascadeView:
        config, plan, window = cascade.config, cascade.plan, cascade.window
        is_full, curve = cascade.num_scored >= config.window, cascade.curve
        is_scored = bool(self._replicas.ids(lane_of("score", config.discriminator)))
        return CascadeView(
            name=config.name,
            discriminator=config.discriminator,
            unscored=None if is_scored else config.when_unscored,
            threshold=plan.threshold,
            deferral_rate=None if window is None else deferral_rate(window, plan.threshold),
            drift=drift(window, curve) if window and curve and is_full else None,
            num_scored=cascade.num_scored,
            window=() if window is None else window.confidences,
        )

    def in_force(self) -> tuple[CascadeInForce, ...]:
        """Return what the cascades do now, and what they have done."""
        images: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, _, reason), count in self._ledger.counters.answered.items():
            images[name][reason] += count
        return tuple(
            CascadeInForce(one.name, one.threshold, one.deferral_rate, images[one.name])
            for one in self.views()
        )

    def take_deferred(self) -> list[Deferred]:
        """Return the deferrals since the last call."""
        deferred, self._deferred = self._deferred, []
        return deferred

    def least_left_s(
        self,
        requests: Sequence[ImageRequest],
        specs: Specs,
        index: int,
        now_s: float,
        *,
        is_idle: bool = False,
    ) -> float:
        """Return the seconds of what follows on a stage in any case, as far as known.

        Args:
            requests: images of one call, whose present stages end together.
            is_idle: of one of them, on a service with nothing else to do.
        """
        left_s = 0.0
        for spec in least_left(specs, index):
            views = [view_in(one, spec, arrival_s=now_s, deadline_s=math.inf) for one in requests]
            pool = self._queue.best_pool(spec.lane) if is_idle else self._queue.pool(spec.lane)
            if pool is None:
                continue
            if is_idle:
                left_s += alone_s(pool.slowest_cost, views[0])
            else:
                left_s += predict_s(views, self._queue, now_s)
        return left_s

    def advance(self, now_s: float) -> None:
        """Decide over every request whose stage has ended."""
        for record, end in self._ledger.take_between():
            try:
                self._advance(record, end, now_s)
            except Exception:
                # a mistake of ours: it ends this request, and no other
                logger.exception("no decision over %s", record.view.request_id)
                self._ledger.fail(record, "error", "the service could not decide what follows")

    def _advance(self, record: RequestRecord, end: StageEnd | None, now_s: float) -> None:
        stages = record.stages
        if end is None:
            self._begin(record, now_s)
        elif stages.present.rules.decides:
            self._decide(record, end, now_s)
        else:
            assert isinstance(end, str), "it makes images, and none was made"
            record.stages = fail(stages, stages.index, end, keeps_image=True)
            self._begin(record, now_s)

    def _begin(self, record: RequestRecord, now_s: float) -> None:
        """Begin the present stage, unless the image so far is published by now."""
        present = record.stages.present
        if record.stages.is_published:
            self._ledger.complete(record, now_s)
        elif present.rules.decides and not self._replicas.ids(present.lane):
            self._decide(record, "lost", now_s)
        else:
            view = self._view_of(record, record.stages.index, now_s)
            self._ledger.enqueue(record, view, now_s)

    def _view_of(self, record: RequestRecord, index: int, now_s: float) -> RequestView:
        """Return what policies know of a request in a stage, which leaves time for later ones."""
        request, specs, arrival_s = record.request, record.stages.specs, record.view.arrival_s
        deadline_s = record.deadline_s - self.least_left_s([request], specs, index, now_s)
        return view_in(request, specs[index], arrival_s=arrival_s, deadline_s=deadline_s)

    def _decide(self, record: RequestRecord, end: StageEnd, now_s: float) -> None:
        """Have an image go on or be published, or the next stage make it anew."""
        stages, record.small = record.stages, None
        confidence = None if isinstance(end, str) else end
        heavy = self._view_of(record, stages.index + 1, now_s)
        # with the time that the heavy model takes, which costs a prediction
        predicted_s: float | None = None
        threshold: float | None = None
        known = self._cascades.get(record.request.called_model)
        requires_heavy = record.requires_heavy
        if confidence is None or known is None:
            wanted = "light" if known is None else known.config.when_unscored
            wanted = "heavy" if requires_heavy else wanted
            slack_s = 0.0
            if requires_heavy:
                slack_s = math.inf
            elif wanted == "heavy" and known is not None and known.config.reserve_s is not None:
                predicted_s = self._predicted_s(heavy, now_s)
                slack_s = self._slack(heavy, now_s, predicted_s).present_s
            decision = decide_unscored(wanted, slack_s)
            if end == "too_late" and not requires_heavy:
                decision = CascadeDecision(is_deferred=False, reason="no_time")
        else:
            # before it counts itself
            plan = known.plan
            known.observe(confidence)
            slack = NO_HURRY
            if needs_slack(plan, confidence) and not requires_heavy:
                predicted_s = self._predicted_s(heavy, now_s)
                slack = self._slack(heavy, now_s, predicted_s)
            decision = decide_deferral(plan, confidence, slack)
            if requires_heavy and decision.reason == "no_time":
                decision = CascadeDecision(is_deferred=True, reason="deferred")
            # for replies: everything is below a little above 1
            threshold = min(1.0, request_threshold(plan, slack))
        record.stages = decide(stages, stages.index, decision, confidence, threshold)
        fields = LogFields(reason=decision.reason)
        if confidence is not None:
            fields["confidence"] = confidence
        log_image("image_decided", record, **fields)
        if decision.is_deferred:
            self._defer(record, decision.reason, heavy, now_s, predicted_s)
        else:
            self._begin(record, now_s)

    def _predicted_s(self, heavy: RequestView, now_s: float) -> float:
        """Return the seconds until the heavy model is done; infinite if nobody serves it."""
        if not self._queue.is_served(heavy.model):
            return math.inf
        return predict_s([heavy], self._queue, now_s)

    def _slack(self, heavy: RequestView, now_s: float, predicted_s: float) -> Slack:
        left_s, pool = heavy.deadline_s - now_s, self._queue.pool(heavy.model)
        idle_s = math.inf if pool is None else alone_s(pool.slowest_cost, heavy)
        return Slack(left_s - predicted_s, left_s - idle_s)

    def _defer(
        self,
        record: RequestRecord,
        reason: CascadeReason,
        heavy: RequestView,
        now_s: float,
        predicted_s: float | None,
    ) -> None:
        if light := record.shown:
            record.preview = Preview(0, 0, heavy.num_steps, light)
        # what is deferred arrives at the heavy model: forecasts expect as many more of it
        self._ledger.stats.note_accepted(replace(heavy, arrival_s=now_s))
        if predicted_s is None:
            predicted_s = self._predicted_s(heavy, now_s)
        self._begin(record, now_s)
        record.predicted_s = predicted_s if math.isfinite(predicted_s) else 0.0
        self._deferred.append(
            Deferred(
                heavy.request_id,
                record.stages.confidence,
                record.stages.threshold,
                reason,
                record.times,
                is_stored=record.has_candidate,
            )
        )

    # what does not come

    def watch(self, now_s: float) -> None:
        """End some of the stages that nobody can end any more, or not in time."""
        due = [one for one in self._ledger.later.values() if now_s >= self._due_s(one)]
        self.is_behind = len(due) > AT_ONCE
        for record in due[:AT_ONCE]:
            self._replicas.alert(record.holder)
            is_scored = record.stages.present.rules.decides
            is_late = not is_scored or now_s >= record.view.deadline_s
            self._ledger.leave_stage(record, "too_late" if is_late else "lost", now_s)
        self.advance(now_s)

    @property
    def next_due_s(self) -> float:
        """Instant at which :meth:`watch` has something to do; infinite if never."""
        return min(map(self._due_s, self._ledger.later.values()), default=math.inf)

    def _due_s(self, record: RequestRecord) -> float:
        """Return the instant at which the present stage is not worth waiting for any more."""
        view = record.view
        if record.stages.present.rules.decides:
            # a discriminator that holds it is alive
            if record.holder is None and not self._replicas.ids(view.model):
                return -math.inf
            return math.inf if self._ignores_slack(record) else view.deadline_s
        pool = self._queue.pool(view.model)
        if pool is None or not record.outlives_stage or self._ignores_slack(record):
            return math.inf
        rest_s = alone_s(pool.slowest_cost, view)
        told_s = None if record.holder is None else record.since_s
        return given_up_s(view.deadline_s, rest_s, told_s)

    def _ignores_slack(self, record: RequestRecord) -> bool:
        known = self._cascades.get(record.request.called_model)
        return known is None or known.config.reserve_s is None or record.requires_heavy


def _is_same(old: CascadeSettings, new: CascadeSettings) -> bool:
    """Whether confidences of one say something of the other's."""
    of_confidence = ("light", "discriminator", "curves", "window")
    return all(getattr(old, name) == getattr(new, name) for name in of_confidence)
