"""What the dispatcher measures; docs/metrics.md describes each metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.dispatch.reports.statistics import Histogram
from ray_cluster.observability.metrics_snapshot import Snapshot, take


@dataclass(frozen=True, slots=True)
class JobCounts:
    """The durable jobs of a cell.

    Attributes:
        num_open: that have not ended.
        num_damaged: whose rows are put aside.
        num_later: that a later release has written.
    """

    num_open: int = 0
    num_damaged: int = 0
    num_later: int = 0


def cell_snapshot(cluster: ClusterSnapshot, jobs: JobCounts) -> Snapshot:
    """Return what the dispatcher has decided so far, and has now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CellCollector(cluster, jobs))
    return take(registry)


class _CellCollector(Collector):
    def __init__(self, cluster: ClusterSnapshot, jobs: JobCounts) -> None:
        self._cluster = cluster
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        cluster = self._cluster
        images = CounterMetricFamily("ray_cluster_images", "Images by event.", labels=["event"])
        for event, count in sorted(cluster.totals.items()):
            images.add_metric([event], count)
        yield images
        yield self._deadlines()
        yield _counts(
            "images_by_fidelity",
            "Images made, by their fidelity.",
            ("model", "fidelity"),
            cluster.counters.made,
        )
        yield _counts(
            "refused_images", "Images refused.", ("model", "reason"), cluster.counters.refused
        )
        yield from self._seconds()
        yield from self._models()
        yield GaugeMetricFamily(
            "ray_cluster_held_back_images",
            "Images of these that wait until a store has their LoRAs.",
            value=cluster.num_held_back,
        )
        yield GaugeMetricFamily("ray_cluster_loras", "Registered LoRAs.", value=cluster.num_loras)
        yield GaugeMetricFamily(
            "ray_cluster_oldest_waiting_seconds",
            "Seconds that the longest-waiting image has been in the system.",
            value=cluster.oldest_waiting_s,
        )
        yield GaugeMetricFamily(
            "ray_cluster_open_jobs", "Durable jobs that have not ended.", value=self._jobs.num_open
        )
        unreadable = GaugeMetricFamily(
            "ray_cluster_unreadable_jobs",
            "Jobs in the store that this release cannot read.",
            labels=["reason"],
        )
        unreadable.add_metric(["damaged"], self._jobs.num_damaged)
        unreadable.add_metric(["later_release"], self._jobs.num_later)
        yield unreadable
        leased = GaugeMetricFamily(
            "ray_cluster_leased_images", "Images leased to a replica.", labels=["model", "replica"]
        )
        room = GaugeMetricFamily(
            "ray_cluster_free_places",
            "Free slots of a replica.",
            labels=["model", "replica"],
        )
        for one in cluster.replicas:
            leased.add_metric([one.model, one.replica_id], one.num_leased)
            room.add_metric([one.model, one.replica_id], one.room)
        yield leased
        yield room
        yield from self._cascades()

    def _models(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "ray_cluster_waiting_images", "Images in the queue.", labels=["model"]
        )
        for model, count in self._cluster.num_waiting_by_model.items():
            waiting.add_metric([model], count)
        yield waiting
        ready = GaugeMetricFamily(
            "ray_cluster_ready_replicas", "Live replicas of a model.", labels=["model"]
        )
        for model, count in self._cluster.num_ready_by_model.items():
            ready.add_metric([model], count)
        yield ready

    def _cascades(self) -> Iterator[Metric]:
        yield _counts(
            "cascade_images",
            "Images of cascades, by the stage that made them and why.",
            ("cascade", "stage", "reason"),
            self._cluster.counters.answered,
        )
        for name, documentation in (
            ("threshold", "Confidence below which images are made anew."),
            ("deferral_rate", "Share of the latest images whose confidence is below it."),
            ("drift", "Distance of the latest confidences from what was calibrated."),
        ):
            gauge = GaugeMetricFamily(
                f"ray_cluster_cascade_{name}", documentation, labels=["cascade"]
            )
            for one in self._cluster.cascades:
                if (value := getattr(one, name)) is not None:
                    gauge.add_metric([one.name], value)
            yield gauge

    def _seconds(self) -> Iterator[Metric]:
        counters = self._cluster.counters
        yield _histograms(
            "real_over_predicted",
            "Real over predicted seconds of images at a model, as predicted when they came there.",
            ["model"],
            {(model,): one for model, one in counters.ratios.items()},
        )
        yield _histograms(
            "stage_seconds",
            "Seconds of the stages of images, waiting included.",
            ["model", "stage"],
            counters.stages,
        )

    def _deadlines(self) -> Metric:
        counters = self._cluster.counters
        ends = {
            (*key, outcome): count
            for outcome in ("met", "unfinished", "missed")
            for key, count in getattr(counters, outcome).items()
        }
        return _counts(
            "deadlines",
            "Images by whether they ended by their deadlines.",
            ("model", "size_class", "outcome"),
            ends,
        )


def _counts(
    name: str, documentation: str, labels: Sequence[str], counts: Mapping[Any, int]
) -> Metric:
    """Return counts whose keys are the values of their labels."""
    found = CounterMetricFamily(f"ray_cluster_{name}", documentation, labels=labels)
    for key, count in sorted(counts.items()):
        found.add_metric(key, count)
    return found


def _histograms(
    name: str, documentation: str, labels: Sequence[str], found: Mapping[Any, Histogram]
) -> Metric:
    """Return histograms whose keys are the values of their labels."""
    metric = HistogramMetricFamily(f"ray_cluster_{name}", documentation, labels=labels)
    for key, one in sorted(found.items()):
        buckets = zip([*map(str, one.bounds), "+Inf"], accumulate(one.counts), strict=True)
        metric.add_metric(key, list(buckets), sum_value=one.total)
    return metric
