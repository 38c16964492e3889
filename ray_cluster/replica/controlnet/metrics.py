"""Metrics of both ends of the ControlNet service; docs/metrics.md describes each."""

from __future__ import annotations

import threading
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ray_cluster.observability.metrics_snapshot import Snapshot, take
from ray_cluster.transport.links import Link, Traffic

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
RetryReason = Literal["closed", "silent", "unknown"]


class ControlNetServerMetrics:
    """What one worker of a ControlNet has computed."""

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = name
        self._rows = Counter(
            "ray_cluster_control_rows",
            "Steps of images that workers of ControlNets were asked for.",
            ["controlnet", "result"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "ray_cluster_control_seconds",
            "Seconds of computing one batch of residuals.",
            ["controlnet"],
            buckets=_SECONDS,
            registry=self._registry,
        ).labels(name)
        self._sizes = Histogram(
            "ray_cluster_control_batch_images",
            "Images in one batch of residuals.",
            ["controlnet"],
            buckets=_BATCH_SIZES,
            registry=self._registry,
        ).labels(name)
        self._links = Gauge(
            "ray_cluster_control_links",
            "Base models' replicas that are connected to workers of a ControlNet.",
            ["controlnet", "link"],
            registry=self._registry,
        )
        self._carried = _Carried("ray_cluster_control_served", self._registry)

    def answered(self, result: str) -> None:
        """Count a row."""
        self._rows.labels(self._name, result).inc()

    def computed(self, num_rows: int, duration_s: float) -> None:
        """Count a batch."""
        self._seconds.observe(duration_s)
        self._sizes.observe(num_rows)

    def connected(self, link: Link) -> None:
        """Count a link from now on."""
        self._links.labels(self._name, link.kind).inc()
        self._carried.add(self._name, link)

    def closed(self, link: Link) -> None:
        """Count a link no more."""
        self._links.labels(self._name, link.kind).dec()
        self._carried.remove(link)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        self._carried.update()
        return take(self._registry)


class ControlNetClientMetrics:
    """What one replica of a base model has asked of ControlNets elsewhere."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._asks = Counter(
            "ray_cluster_control_asks",
            "Steps of images whose residuals were asked of ControlNets elsewhere.",
            ["controlnet", "result"],
            registry=self._registry,
        )
        self._retries = Counter(
            "ray_cluster_control_retries",
            "Steps that were sent once more.",
            ["controlnet", "reason"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "ray_cluster_control_answer_seconds",
            "Seconds from sending a step to its residuals.",
            ["controlnet", "link"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._carried = _Carried("ray_cluster_control", self._registry)

    def ended(self, name: str, result: Literal["answered", "failed", "cancelled"]) -> None:
        """Count what became of an ask."""
        self._asks.labels(name, result).inc()

    def retried(self, name: str, reason: RetryReason) -> None:
        """Count a step that is sent again."""
        self._retries.labels(name, reason).inc()

    def took(self, name: str, link: Link, duration_s: float) -> None:
        """Count an answer."""
        self._seconds.labels(name, link.kind).observe(duration_s)

    def connected(self, name: str, link: Link) -> None:
        """Count what a link carries from now on."""
        self._carried.add(name, link)

    def closed(self, link: Link) -> None:
        """Count what it has carried for the last time."""
        self._carried.remove(link)

    def snapshot(self) -> Snapshot:
        """Return the present values."""
        self._carried.update()
        return take(self._registry)


class _Carried:
    """What links have carried, those that are closed included."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            f"{prefix}_bytes",
            "Bytes that links between base models and ControlNets have carried.",
            ["controlnet", "link", "direction"],
            registry=registry,
        )
        self._send_s = Counter(
            f"{prefix}_send_seconds",
            "Seconds that sends took on these links, waiting for room included.",
            ["controlnet", "link"],
            registry=registry,
        )
        self._lock = threading.Lock()
        # by identity, the ControlNet, the link, and what of it was counted
        self._links: dict[int, tuple[str, Link, Traffic]] = {}

    def add(self, name: str, link: Link) -> None:
        with self._lock:
            self._links[id(link)] = (name, link, Traffic())

    def remove(self, link: Link) -> None:
        with self._lock:
            self._count(id(link))
            self._links.pop(id(link), None)

    def update(self) -> None:
        with self._lock:
            for key in self._links:
                self._count(key)

    def _count(self, key: int) -> None:
        if key not in self._links:
            return
        name, link, counted = self._links[key]
        now = link.traffic
        sent, received = (self._bytes.labels(name, link.kind, way) for way in ("sent", "received"))
        sent.inc(now.sent_bytes - counted.sent_bytes)
        received.inc(now.received_bytes - counted.received_bytes)
        self._send_s.labels(name, link.kind).inc(now.send_s - counted.send_s)
        self._links[key] = (name, link, now)
