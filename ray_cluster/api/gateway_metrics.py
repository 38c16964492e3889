"""What a gateway measures; docs/metrics.md describes each metric."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from ray_cluster.observability.metrics_snapshot import Snapshot, take

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


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
