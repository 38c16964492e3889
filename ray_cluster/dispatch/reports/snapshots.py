"""The dispatcher's state at one instant, for status pages and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ray_cluster.dispatch.queue.admission_view import AdmissionView
from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.reports.demand import DemandCounts
from ray_cluster.dispatch.reports.statistics import OutcomeCounters
from ray_cluster.dispatch.stages import RULES
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.policies.types import CascadeEntry, ReplicaView
from ray_cluster.protocol.leases import lane_words, split_lane


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


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What waits, what is leased, and what happened since the dispatcher started.

    Attributes:
        oldest_waiting_s: seconds the longest-waiting request has been in the system; 0 if none.
        num_waiting_by_model: every known model and what is configured for last stages, also
            those with nothing waiting.
        counters: a copy.
        demand: likewise, of what calls ask for.
        num_held_back: of those that wait, for add-ons that are not there yet.
        num_loras: that are registered.
        missing_controls: ControlNets that nobody serves.
        asleep: models without replicas that a controller starts some of when they are called.
    """

    num_waiting: int
    num_leased: int
    oldest_waiting_s: float
    num_waiting_by_model: Mapping[str, int]
    replicas: tuple[ReplicaView, ...]
    counters: OutcomeCounters
    demand: DemandCounts
    cascades: tuple[CascadeView, ...] = ()
    num_held_back: int = 0
    num_loras: int = 0
    missing_controls: tuple[str, ...] = ()
    asleep: frozenset[str] = frozenset()

    @property
    def totals(self) -> Mapping[str, int]:
        """Events since the dispatcher started, by name."""
        return self.counters.totals

    @property
    def num_ready_by_model(self) -> dict[str, int]:
        """Live replicas of each model, 0 for one that should have some; of none that is asleep."""
        found = Counter(replica.model for replica in self.replicas)
        wanted = (one for one in self.num_waiting_by_model if found[one] or one not in self.asleep)
        return {model: found[model] for model in wanted}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know: which models and others have no live replica."""
        models = (
            f"no replica of {words.removeprefix('the model ')} lives; "
            f"{self.num_waiting_by_model[model]} images wait for one"
            for model, num_ready in self.num_ready_by_model.items()
            for words in [lane_words(model)]
            if num_ready == 0
        )
        cascades = (
            f"no replica of the discriminator {one.discriminator} lives; {one.name} answers with "
            f"{one.unscored} images"
            for one in self.cascades
            if one.unscored is not None
        )
        controls = (
            f"nobody serves the ControlNet {name}; images with it wait"
            for name in self.missing_controls
        )
        return (*models, *cascades, *controls)

    @staticmethod
    def of(
        ledger: Ledger,
        replicas: Replicas,
        *,
        queue: AdmissionView,
        num_loras: int,
        missing_controls: tuple[str, ...],
        cascades: tuple[CascadeView, ...],
        now_s: float,
    ) -> ClusterSnapshot:
        """Return the present state.

        Args:
            queue: has the models of the settings; of another one, what waits is counted only while
                it has replicas or waiting requests.
        """
        counts, num_waiting = ledger.waiting.count_by_model(), len(ledger.waiting)
        ages_s = (now_s - view.arrival_s for view in ledger.waiting.views)
        others = [one for one in queue.configured if split_lane(one)[0] != "denoise"]
        models = [
            model
            for model in (*replicas.profiles, *others)
            if model in queue.configured or replicas.ids(model) or counts[model]
        ]
        return ClusterSnapshot(
            num_waiting=num_waiting,
            num_leased=len(ledger) - num_waiting,
            oldest_waiting_s=max(ages_s, default=0.0),
            num_waiting_by_model={model: counts[model] for model in sorted(models)},
            # others hold no requests
            replicas=tuple(one.view() for one in replicas if one.registration.kind in RULES),
            counters=ledger.counters.copy(),
            demand=ledger.demand.read(),
            cascades=cascades,
            num_held_back=num_waiting - len(ledger.queue),
            num_loras=num_loras,
            missing_controls=missing_controls,
            asleep=queue.asleep if queue.is_woken else frozenset(),
        )
