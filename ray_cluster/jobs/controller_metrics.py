"""Metrics of the controller, as the dispatcher has heard of its rounds."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ray_cluster.observability.metrics_snapshot import Snapshot, take
from ray_cluster.protocol.controller import PlanReport, RoundRecord


def plan_snapshot(report: PlanReport, now_s: float) -> Snapshot:
    """Return the metrics of a cell's controller; none where it has none.

    Args:
        now_s: Unix time.
    """
    if not report.is_enabled:
        return ()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PlanCollector(report, now_s))
    return take(registry)


class _PlanCollector(Collector):
    def __init__(self, report: PlanReport, now_s: float) -> None:
        self._report = report
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        report = self._report
        yield SummaryMetricFamily(
            "ray_cluster_plan_round_seconds",
            "Seconds of rounds of the controller.",
            count_value=report.num_rounds,
            sum_value=report.round_s,
        )
        yield CounterMetricFamily(
            "ray_cluster_plan_actions",
            "Changes that plans have made: of a pool's replicas, or of caps and thresholds.",
            value=report.num_actions,
        )
        yield CounterMetricFamily(
            "ray_cluster_plan_failures",
            "Changes that failed; they are tried again.",
            value=report.num_failures,
        )
        yield CounterMetricFamily(
            "ray_cluster_plan_rollbacks",
            "Growths of pools that were given up, as their replicas were not ready in time.",
            value=report.num_rollbacks,
        )
        yield GaugeMetricFamily(
            "ray_cluster_plan_paused", "Whether plans are made only.", value=report.mode == "paused"
        )
        latest = report.latest
        if latest is not None and report.heard_s is not None:
            yield from self._latest(latest, self._now_s - report.heard_s)

    def _latest(self, latest: RoundRecord, age_s: float) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "ray_cluster_plan_age_seconds", "Seconds since the last round.", value=age_s
        )
        yield GaugeMetricFamily(
            "ray_cluster_plan_version", "Version of the plan.", value=latest.version
        )
        yield GaugeMetricFamily(
            "ray_cluster_plan_infeasible",
            "Whether the demand cannot be met.",
            value=latest.infeasible is not None,
        )
        yield GaugeMetricFamily(
            "ray_cluster_plan_overdue_pools",
            "Pools whose planned replicas are not ready in time.",
            value=len(latest.overdue),
        )
        replicas = GaugeMetricFamily(
            "ray_cluster_plan_replicas", "Replicas of a pool.", labels=["pool", "kind"]
        )
        for one in latest.pools:
            replicas.add_metric([one.pool, "planned"], one.num_planned)
            replicas.add_metric([one.pool, "ready"], one.num_ready)
        yield replicas
        demand = GaugeMetricFamily(
            "ray_cluster_demand_per_second",
            "Estimated images per second that are called for.",
            labels=["service"],
        )
        for service in latest.demand:
            if service.per_s is not None:
                demand.add_metric([service.service], service.per_s)
        yield demand
