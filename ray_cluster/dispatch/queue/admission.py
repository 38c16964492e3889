"""Offers: what is asked of the admission policy, and what follows from its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.attached import Attached
from ray_cluster.dispatch.cascades.advance import Cascades
from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.exchanges import Exchanges
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.reports.log import log_refused
from ray_cluster.dispatch.stages import stages_of, view_in
from ray_cluster.policies.admission.admission import admit, refuse_beyond
from ray_cluster.policies.types import Offer, RequestView
from ray_cluster.requests import ImageRequest


class Admission:
    """Decides over offers; what it accepts waits in the ledger.

    Attributes:
        removed: models that are not in the settings any more; none of them is accepted, and what
            was accepted is still made while a replica lives.
    """

    def __init__(
        self,
        ledger: Ledger,
        queue: AdmissionView,
        cascades: Cascades,
        attached: Attached,
        exchanges: Exchanges,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._cascades = cascades
        self._attached = attached
        self._exchanges = exchanges
        self._is_closing = False
        self.removed: frozenset[str] = frozenset()

    def apply(self, config: DispatchConfig, limits: LimitsConfig) -> None:
        """Apply other settings."""
        self._default_slo_s = config.default_slo_s
        self._most_attached = limits.max_attached_images_per_client
        self._queue.max_waiting = limits.max_queued_images
        self._queue.max_waiting_s = limits.max_queue_s
        self._queue.has_preemption = config.preemption

    def close(self) -> None:
        """Refuse every offer from now on."""
        self._is_closing = True

    def offer(self, requests: Sequence[ImageRequest], now_s: float, client: str | None) -> Offer:
        """See :meth:`DispatchCore.offer`."""
        offer, views = self._decide(requests, now_s, client)
        if not requests:
            return offer
        if offer.accepted:
            self._ledger.accept(
                requests, views, offer, client=client, slo_s=self._default_slo_s, now_s=now_s
            )
            if client is not None:
                self._attached.watch(requests)
            self._exchanges.plan(offer.exchanges)
            return offer
        self._ledger.counters.note_refused(requests, offer)
        log_refused(requests, str(offer.reason))
        if _lacks_capacity(offer):
            whose = _client_of(requests[0], client)
            self._ledger.demand.note_unmet(requests, views, whose, now_s)
        return offer

    def estimate(self, requests: Sequence[ImageRequest], now_s: float, client: str) -> Offer:
        """See :meth:`DispatchCore.estimate`."""
        return self._decide(requests, now_s, client)[0]

    def _decide(
        self, requests: Sequence[ImageRequest], now_s: float, client: str | None
    ) -> tuple[Offer, list[RequestView]]:
        """Return the answer to an offer, and its requests as it sees them."""
        if len({request.model for request in requests}) > 1:
            raise ValueError("an offer is for one model; offer the requests of each on their own")
        self._ledger.age(now_s)
        if not requests:
            return Offer(accepted=True), []
        later_s = self._later_s(requests, now_s)
        views = [self._view(one, now_s, later_s) for one in requests]
        answer = self._answer(requests, views, client, now_s)
        return self._of_all_stages(answer, requests, later_s, now_s), views

    def _answer(
        self,
        requests: Sequence[ImageRequest],
        views: Sequence[RequestView],
        client: str | None,
        now_s: float,
    ) -> Offer:
        ids = [one.request_id for one in requests]
        if self._is_closing:
            return Offer(accepted=False, reason="closing")
        if len(set(ids)) < len(ids) or any(request_id in self._ledger for request_id in ids):
            return Offer(accepted=False, reason="duplicate_id")
        specs = stages_of(requests[0]).specs
        vital = [spec.lane for spec in specs[1:] if spec.is_vital]
        if any(spec.lane in self.removed for spec in specs if spec.lane not in vital):
            return Offer(accepted=False, reason="unknown_model")
        for lane in vital:
            if lane in self.removed or self._queue.pool(lane) is None:
                return Offer(accepted=False, reason="stage_not_ready", lane=lane)
        own = self._attached.view_of(client, self._most_attached)
        whose = _client_of(requests[0], client)
        if (refused := self._refuse_later(requests, whose, now_s)) is not None:
            return refused
        share = self._ledger.waiting.share(requests, views[0].model, whose)
        offer = admit(views, self._queue, own, share)
        if wait_s := self._ledger.waiting.wait_s(requests, now_s):
            offer = replace(offer, predicted_s=offer.predicted_s + wait_s)
        return offer

    def _refuse_later(
        self, requests: Sequence[ImageRequest], whose: str, now_s: float
    ) -> Offer | None:
        """Refuse what a later stage may make if its client's share there is full."""
        for spec in stages_of(requests[0]).specs[1:]:
            if spec.rules.decides or self._queue.pool(spec.lane) is None:
                continue
            views = [view_in(one, spec, arrival_s=now_s, deadline_s=math.inf) for one in requests]
            share = self._ledger.waiting.share(requests, spec.lane, whose)
            if (refused := refuse_beyond(views, share, self._queue)) is not None:
                return refused
        return None

    def _later_s(
        self, requests: Sequence[ImageRequest], now_s: float, *, is_idle: bool = False
    ) -> float:
        """Return the seconds of what follows on the first stage in any case."""
        specs = stages_of(requests[0]).specs
        return self._cascades.least_left_s(requests, specs, 0, now_s, is_idle=is_idle)

    def _of_all_stages(
        self, offer: Offer, requests: Sequence[ImageRequest], later_s: float, now_s: float
    ) -> Offer:
        """Return what the policy answers about the first stage as an answer about all of them."""
        if offer.reason != "too_late" or math.isfinite(offer.retry_after_s):
            return offer
        idle_s = self._later_s(requests, now_s, is_idle=True)
        needs_s = offer.predicted_s + idle_s
        if needs_s <= min(self._slo_s(one) for one in requests):
            # what waits for a later stage is in the way, and will not be for ever
            return replace(offer, predicted_s=0.0, retry_after_s=max(0.0, later_s - idle_s))
        return replace(offer, predicted_s=needs_s)

    def _slo_s(self, request: ImageRequest) -> float:
        return self._default_slo_s if request.slo_s is None else request.slo_s

    def _view(self, request: ImageRequest, now_s: float, later_s: float) -> RequestView:
        # promised is the first image, and what follows on it in any case
        slo_s = self._slo_s(request) - self._ledger.waiting.wait_s([request], now_s) - later_s
        first = stages_of(request).present
        return view_in(request, first, arrival_s=now_s, deadline_s=now_s + slo_s)


def _client_of(request: ImageRequest, client: str | None) -> str:
    """Return whose share a request takes."""
    return request.sharer if client is None else client


def _lacks_capacity(offer: Offer) -> bool:
    """Whether more replicas would have been another answer."""
    if offer.reason == "too_late":
        # even an idle service would be too late if it is infinite
        return math.isfinite(offer.retry_after_s)
    return offer.reason in ("queue_full", "model_not_ready")
