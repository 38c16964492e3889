"""Metrics of a store of LoRAs; docs/metrics.md describes each. It imports no model library."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ray_cluster.observability.metrics_snapshot import Snapshot, take

_FETCH_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class LoraMetrics:
    """What one store of LoRAs has fetched and deleted, and what it keeps."""

    def __init__(self, node: str) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "ray_cluster_lora_fetch_seconds",
            "Seconds until a LoRA was on its node, or known not to be had.",
            ["result"],
            buckets=_FETCH_SECONDS,
            registry=self._registry,
        )
        self._evicted = Counter(
            "ray_cluster_lora_evictions",
            "LoRAs that were deleted from a node to make room.",
            registry=self._registry,
        )
        self._num_bytes = Gauge(
            "ray_cluster_lora_disk_bytes",
            "Size of all factors on a node.",
            ["node"],
            registry=self._registry,
        ).labels(node)

    def ended(self, result: str, took_s: float) -> None:
        """Count a fetch."""
        self._seconds.labels(result).observe(took_s)

    def evicted(self, count: int) -> None:
        """Count what was deleted."""
        self._evicted.inc(count)

    def snapshot(self, num_bytes: int) -> Snapshot:
        """Return the present values."""
        self._num_bytes.set(num_bytes)
        return take(self._registry)
