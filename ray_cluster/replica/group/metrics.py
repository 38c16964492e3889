"""A group's metrics; docs/metrics.md describes each."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from ray_cluster.engine.groups.tally import Tally
from ray_cluster.observability.metrics_snapshot import Snapshot, take


class GroupMetrics:
    """What the ranks of one group have done."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._steps = self._counter("group_steps", "Steps of images on so many ranks.", "degree")
        self._seconds = self._counter(
            "group_step_seconds", "Seconds of steps on so many ranks.", "degree"
        )
        self._ranks = self._counter(
            "group_rank_seconds", "Seconds of ranks, in a step or idle.", "state"
        )
        self._switches = self._counter(
            "group_switches", "Steps on other ranks than the image's last."
        )
        self._lost = self._counter("group_lost_steps", "Steps that were lost with their ranks.")
        self._recoveries = self._counter(
            "group_recoveries", "Times that all ranks of a group were started again."
        )
        self._recovery_s = Gauge(
            "ray_cluster_group_recovery_seconds",
            "Seconds until the ranks were there again, the last time.",
            ["model"],
            registry=self._registry,
        )
        self._seen: dict[tuple[object, ...], float] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ray_cluster_{name}", text, ["model", *labels], registry=self._registry)

    def _rise(self, counter: Counter, total: float, *labels: str) -> None:
        """Bring a counter to a total that only ever grows."""
        key = (id(counter), *labels)
        counter.labels(self._model, *labels).inc(max(0.0, total - self._seen.get(key, 0.0)))
        self._seen[key] = total

    def snapshot(self, tally: Tally, num_recoveries: int, recovery_s: float) -> Snapshot:
        """Return the present values.

        Args:
            num_recoveries: times that all ranks were started again.
            recovery_s: seconds that the last one took.
        """
        for degree, number in tuple(tally.steps.items()):
            self._rise(self._steps, number, str(degree))
            self._rise(self._seconds, tally.step_s[degree], str(degree))
        self._rise(self._ranks, tally.busy_s, "busy")
        self._rise(self._ranks, tally.idle_s, "idle")
        self._rise(self._switches, tally.num_switches)
        self._rise(self._lost, tally.num_lost)
        self._rise(self._recoveries, num_recoveries)
        self._recovery_s.labels(self._model).set(recovery_s)
        return take(self._registry)
