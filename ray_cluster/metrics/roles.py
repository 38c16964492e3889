"""What each kind of process measures; docs/metrics.md tells what each means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ray_cluster.dispatch.snapshots import ClusterSnapshot
from ray_cluster.dispatch.tally import RATIO_BOUNDS
from ray_cluster.metrics.snapshot import Snapshot, take

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_STEP_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_NUM_SIZES = (1, 2, 3, 4, 6, 8)


class GatewayMetrics:
    """Calls that one gateway has answered."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ray_cluster_http_requests",
            "HTTP calls answered.",
            ["route", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "ray_cluster_http_request_seconds",
            "Seconds from a call to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def answered(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Count a call."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        return take(self._registry)


class ReplicaMetrics:
    """Denoising steps that one replica has made, and what it exported and resumed."""

    def __init__(self, model: str, replica_id: str) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "ray_cluster_step_seconds",
            "Seconds of one denoising step of a batch.",
            ["model"],
            buckets=_STEP_SECONDS,
            registry=self._registry,
        ).labels(model)
        self._rows = Histogram(
            "ray_cluster_step_batch_images",
            "Images in one denoising step.",
            ["model"],
            buckets=_BATCH_SIZES,
            registry=self._registry,
        ).labels(model)
        self._sizes = Histogram(
            "ray_cluster_step_batch_sizes",
            "Different image sizes in one denoising step.",
            ["model"],
            buckets=_NUM_SIZES,
            registry=self._registry,
        ).labels(model)
        steps = Counter(
            "ray_cluster_image_steps",
            "Denoising steps of images, by whether they took over what a former one had computed.",
            ["model", "kind"],
            registry=self._registry,
        )
        self._whole, self._reused = steps.labels(model, "whole"), steps.labels(model, "reused")
        self._exports = self._counter("state_exports", "States put into the store.", model)
        self._resumed = self._counter("resumed_images", "Images gone on with elsewhere.", model)
        self._resumed_steps = self._counter(
            "resumed_steps", "Steps not made again, because a state contained them.", model
        )
        self._interval = Gauge(
            "ray_cluster_steps_between_exports",
            "Steps of an image between two exports of its state; 0 while there are none.",
            ["model", "replica"],
            registry=self._registry,
        ).labels(model, replica_id)
        self._num_exports = 0

    def _counter(self, name: str, documentation: str, model: str) -> Counter:
        counter = Counter(f"ray_cluster_{name}", documentation, ["model"], registry=self._registry)
        return counter.labels(model)

    def stepped(
        self, *, seconds: float, num_images: int, num_sizes: int, num_reused: int = 0
    ) -> None:
        """Count a step; called in the step thread, a few microseconds."""
        self._whole.inc(num_images - num_reused)
        self._reused.inc(num_reused)
        self._seconds.observe(seconds)
        self._rows.observe(num_images)
        self._sizes.observe(num_sizes)

    def resumed(self, num_steps: int) -> None:
        """Count an image that goes on from a state with so many steps."""
        self._resumed.inc()
        self._resumed_steps.inc(num_steps)

    def exported(self, *, total: int, interval: int | None) -> None:
        """Take in how many states were put into the store, and every how many steps they are."""
        self._exports.inc(total - self._num_exports)
        self._num_exports = total
        self._interval.set(interval or 0)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        return take(self._registry)


def cell_snapshot(cluster: ClusterSnapshot, num_open_jobs: int) -> Snapshot:
    """Return what the dispatcher has decided so far, and has now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Cell(cluster, num_open_jobs))
    return take(registry)


class _Cell(Collector):
    def __init__(self, cluster: ClusterSnapshot, num_open_jobs: int) -> None:
        self._cluster = cluster
        self._num_open_jobs = num_open_jobs

    def collect(self) -> Iterator[Metric]:
        cluster = self._cluster
        images = CounterMetricFamily(
            "ray_cluster_images", "Images by what became of them.", labels=["event"]
        )
        for event, count in sorted(cluster.totals.items()):
            images.add_metric([event], count)
        yield images
        yield self._deadlines()
        yield _counts(
            "images_by_fidelity",
            "Images made, by the fidelity that they got.",
            ("model", "fidelity"),
            cluster.made,
        )
        yield _counts(
            "refused_images", "Images that were not let in.", ("model", "reason"), cluster.refused
        )
        yield _counts(
            "refusal_verdicts",
            "Images refused as too late, by whether that was right as far as can be told.",
            ("model", "verdict"),
            cluster.verdicts,
        )
        yield self._ratios()
        waiting = GaugeMetricFamily(
            "ray_cluster_waiting_images", "Images in the queue.", labels=["model"]
        )
        for model, count in cluster.num_waiting_by_model.items():
            waiting.add_metric([model], count)
        yield waiting
        yield GaugeMetricFamily(
            "ray_cluster_oldest_waiting_seconds",
            "Seconds that the longest-waiting image has been in the system.",
            value=cluster.oldest_waiting_s,
        )
        yield GaugeMetricFamily(
            "ray_cluster_open_jobs", "Durable jobs that have not ended.", value=self._num_open_jobs
        )
        leased = GaugeMetricFamily(
            "ray_cluster_leased_images", "Images that a replica has.", labels=["model", "replica"]
        )
        room = GaugeMetricFamily(
            "ray_cluster_free_places",
            "Images that a replica could take.",
            labels=["model", "replica"],
        )
        for one in cluster.replicas:
            leased.add_metric([one.model, one.replica_id], one.num_leased)
            room.add_metric([one.model, one.replica_id], one.num_free)
        yield leased
        yield room

    def _deadlines(self) -> Metric:
        cluster = self._cluster
        ends = {(*key, "met"): count for key, count in cluster.met.items()}
        ends |= {(*key, "missed"): count for key, count in cluster.missed.items()}
        return _counts(
            "deadlines",
            "Images by whether they ended by their deadlines.",
            ("model", "size_class", "outcome"),
            ends,
        )

    def _ratios(self) -> Metric:
        found = HistogramMetricFamily(
            "ray_cluster_real_over_predicted",
            "Seconds that images took over those predicted when they were let in.",
            labels=["model"],
        )
        bounds = [*map(str, RATIO_BOUNDS), "+Inf"]
        for model, ratios in sorted(self._cluster.ratios.items()):
            buckets = zip(bounds, accumulate(ratios.counts), strict=True)
            found.add_metric([model], list(buckets), sum_value=ratios.total)
        return found


def _counts(
    name: str, documentation: str, labels: Sequence[str], counts: Mapping[Any, int]
) -> Metric:
    """Return counts whose keys are the values of their labels."""
    found = CounterMetricFamily(f"ray_cluster_{name}", documentation, labels=labels)
    for key, count in sorted(counts.items()):
        found.add_metric(key, count)
    return found
