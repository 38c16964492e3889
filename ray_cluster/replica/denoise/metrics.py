"""A replica's metrics; docs/metrics.md describes each."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ray_cluster.engine.step.step_engine import StepReport
from ray_cluster.observability.metrics_snapshot import Snapshot, take

_STEP_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_CONFIDENCES = tuple(tenth / 10 for tenth in range(1, 11))
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
_NUM_SIZES = (1, 2, 3, 4, 6, 8)


class ScorerMetrics:
    """Images that one replica of a discriminator has scored."""

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        self._confidences = Histogram(
            "ray_cluster_confidence",
            "Confidences of light images.",
            ["discriminator"],
            buckets=_CONFIDENCES,
            registry=self._registry,
        ).labels(name)
        self._seconds = Histogram(
            "ray_cluster_score_seconds",
            "Seconds of scoring one batch.",
            ["discriminator"],
            buckets=_STEP_SECONDS,
            registry=self._registry,
        ).labels(name)

    def scored(self, confidences: Sequence[float], duration_s: float) -> None:
        """Count a batch."""
        self._seconds.observe(duration_s)
        for confidence in confidences:
            self._confidences.observe(confidence)

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
        self._late = self._counter(
            "late_steps", "Steps that images repeat because residuals were late.", model
        )
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
        self._merged = Gauge(
            "ray_cluster_merged_loras",
            "1 while the weights of a replica's model are merged with LoRAs, else 0.",
            ["model", "replica"],
            registry=self._registry,
        ).labels(model, replica_id)
        self._merges = self._counter(
            "lora_merges", "Merges of LoRAs into a model's weights.", model
        )
        self._num_merges = 0

    def _counter(self, name: str, documentation: str, model: str) -> Counter:
        counter = Counter(f"ray_cluster_{name}", documentation, ["model"], registry=self._registry)
        return counter.labels(model)

    def stepped(self, report: StepReport) -> None:
        """Count a step; called in the step thread, a few microseconds."""
        num_images = len(report.stepped)
        self._whole.inc(num_images - report.num_reused)
        self._reused.inc(report.num_reused)
        self._late.inc(len(report.late))
        self._seconds.observe(report.duration_s)
        self._rows.observe(num_images)
        self._sizes.observe(report.work.num_sizes)

    def resumed(self, num_steps: int) -> None:
        """Count an image that goes on from a state with so many steps."""
        self._resumed.inc()
        self._resumed_steps.inc(num_steps)

    def merged(self, *, total: int, is_merged: bool) -> None:
        """Update whether LoRAs are merged, and how often they were."""
        self._merges.inc(total - self._num_merges)
        self._num_merges = total
        self._merged.set(is_merged)

    def exported(self, *, total: int, interval: int | None) -> None:
        """Update the number of stored states, and the steps between two exports."""
        self._exports.inc(total - self._num_exports)
        self._num_exports = total
        self._interval.set(interval or 0)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        return take(self._registry)
