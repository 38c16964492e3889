"""Prometheus' alert rules: what should wake somebody, and what they should do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["page", "ticket"]

# share of images that may miss their deadlines over a month
_ALLOWED_MISSES = 0.01
# changes of a pool in an hour: a start and a stop every six minutes. A replica takes up to a minute
# to load and stays for `dwell_s`, a minute by default, so that most of its life would be of no use;
# demand that comes and goes within an hour makes some four
_MOST_CHANGES = 20


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule.

    Attributes:
        expr: in PromQL; something comes of it while there is something to do.
        holds_for: how long before it fires.
        summary: what is wrong, in a line.
        action: what to do.
    """

    name: str
    expr: str
    holds_for: str
    severity: Severity
    summary: str
    action: str


def _burn(window: str, times: float) -> str:
    """Return where deadlines are missed so many times as fast as is allowed."""
    missed = f'sum by (model) (rate(ray_cluster_deadlines_total{{outcome="missed"}}[{window}]))'
    every = f"sum by (model) (rate(ray_cluster_deadlines_total[{window}]))"
    return f"({missed} / {every}) > {times * _ALLOWED_MISSES:g}"


ALERTS: tuple[Alert, ...] = (
    Alert(
        "RayClusterDeadlinesMissedFast",
        f"{_burn('1h', 14.4)} and {_burn('5m', 14.4)}",
        "2m",
        "page",
        "{{ $labels.model }} misses deadlines 14 times as fast as is allowed",
        "Look at the queue and at the replicas: is one gone, or has demand grown? Add replicas.",
    ),
    Alert(
        "RayClusterDeadlinesMissedSlowly",
        f"{_burn('6h', 6)} and {_burn('30m', 6)}",
        "15m",
        "ticket",
        "{{ $labels.model }} misses deadlines 6 times as fast as is allowed",
        "Plan for more replicas, or let calls allow fewer steps.",
    ),
    Alert(
        "RayClusterQueueOld",
        "max(ray_cluster_oldest_waiting_seconds) > 120",
        "5m",
        "page",
        "An image has waited for {{ $value | humanizeDuration }}",
        "See /readyz for what is missing: a model's replicas, a ControlNet, a LoRA's source.",
    ),
    Alert(
        "RayClusterNoReplica",
        "min by (model) (ray_cluster_ready_replicas) == 0",
        "2m",
        "page",
        "No replica of {{ $labels.model }} lives",
        "Calls for it wait, and a cascade answers with what it has. See its replicas' logs.",
    ),
    Alert(
        "RayClusterCascadeUnfinished",
        'sum by (cascade) (rate(ray_cluster_cascade_images_total{reason=~"no_time|heavy_failed"}'
        "[10m])) / sum by (cascade) (rate(ray_cluster_cascade_images_total[10m])) > 0.1",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of {{ $labels.cascade }} are light images that were to "
        "be made anew",
        "Deadlines are met by images known to be worse. Is a replica of the heavy model gone?",
    ),
    Alert(
        "RayClusterImagesFail",
        'sum(rate(ray_cluster_images_total{event=~"error|lost"}[10m])) '
        '/ sum(rate(ray_cluster_images_total{event="accepted"}[10m])) > 0.01',
        "10m",
        "page",
        "{{ $value | humanizePercentage }} of the accepted images fail",
        "Look for image_failed in the logs: it has the error of each.",
    ),
    Alert(
        "RayClusterServerErrors",
        'sum(rate(ray_cluster_http_requests_total{status=~"5.."}[5m])) '
        "/ sum(rate(ray_cluster_http_requests_total[5m])) > 0.05",
        "10m",
        "page",
        "{{ $value | humanizePercentage }} of the calls get a 5xx",
        "The codes in the replies say what does not answer (docs/api.md, Errors).",
    ),
    Alert(
        "RayClusterPredictionOff",
        "sum by (model) (rate(ray_cluster_real_over_predicted_sum[30m])) "
        "/ sum by (model) (rate(ray_cluster_real_over_predicted_count[30m])) > 1.5",
        "30m",
        "ticket",
        "Images of {{ $labels.model }} take {{ $value | humanize }} times what was predicted",
        "Something else uses the machine, or a replica is slow: compare step times of replicas.",
    ),
    Alert(
        "RayClusterControlNetsLate",
        "sum by (model) (rate(ray_cluster_late_steps_total[10m])) "
        "/ sum by (model) (rate(ray_cluster_image_steps_total[10m])) > 0.05",
        "15m",
        "ticket",
        "{{ $value | humanizePercentage }} of the steps of {{ $labels.model }} wait for residuals",
        "Give the ControlNet more replicas, or run it with mode local.",
    ),
    Alert(
        "RayClusterLorasUnreachable",
        'sum(rate(ray_cluster_lora_fetch_seconds_count{result="unreachable"}[30m])) > 0',
        "30m",
        "ticket",
        "LoRAs cannot be fetched",
        "GET /v1/loras names them, with the reason.",
    ),
    Alert(
        "RayClusterCascadeDrifts",
        "max by (cascade) (ray_cluster_cascade_drift) > 0.1",
        "1h",
        "ticket",
        "The confidences of {{ $labels.cascade }} are not what they were calibrated to",
        "Run ray-cluster models calibrate-cascade.",
    ),
    Alert(
        "RayClusterControllerSilent",
        # the second half: none was heard of since the dispatcher started
        "min_over_time(ray_cluster_plan_age_seconds[5m]) > 60 "
        "or (ray_cluster_plan_paused >= 0 unless on () ray_cluster_plan_age_seconds)",
        "5m",
        "ticket",
        "The controller makes no plans; the last one stays in force",
        "See the Serve application controller: is it running, and does it reach the dispatcher?",
    ),
    Alert(
        "RayClusterPlanNotApplied",
        "max(ray_cluster_plan_overdue_pools) > 0",
        "5m",
        "ticket",
        "{{ $value }} pools have fewer replicas than planned, for longer than apply_timeout_s",
        "ray-cluster plan show names them. See their replicas' logs, and whether devices are free.",
    ),
    Alert(
        "RayClusterPlanRolledBack",
        # a lasting cause leads to a rollback an hour at least: holds are 16 apply_timeout_s at most
        "sum(increase(ray_cluster_plan_rollbacks_total[2h])) > 1.5",
        "1m",
        "ticket",
        "Replicas were given up {{ $value | humanize }} times in two hours: they were not ready in "
        "time",
        "ray-cluster plan history names the pools. See why their replicas do not start; where they "
        "only take longer, raise control.apply_timeout_s.",
    ),
    Alert(
        "RayClusterPlanFails",
        "sum(rate(ray_cluster_plan_failures_total[10m])) > 0",
        "15m",
        "ticket",
        "Changes of the plan keep failing",
        "ray-cluster plan show says why: mostly the dispatcher or Ray's dashboard does not answer.",
    ),
    Alert(
        "RayClusterPoolFlaps",
        f'max by (pool) (changes(ray_cluster_plan_replicas{{kind="planned"}}[1h])) '
        f"> {_MOST_CHANGES}",
        "10m",
        "ticket",
        "The planned replicas of {{ $labels.pool }} changed {{ $value }} times in an hour",
        "Raise control.dwell_s, or the pool's min_replicas.",
    ),
    Alert(
        "RayClusterDemandInfeasible",
        "max(ray_cluster_plan_infeasible) > 0",
        "30m",
        "ticket",
        "The demand cannot be met with the devices and within the bounds of the settings",
        "ray-cluster plan explain says what is short: add devices, or raise max_replicas.",
    ),
)


def alert_rules() -> dict[str, Any]:
    """Return the rules as the content of Prometheus' file."""
    return {
        "groups": [
            {
                "name": "ray-cluster",
                "rules": [
                    {
                        "alert": one.name,
                        "expr": one.expr,
                        "for": one.holds_for,
                        "labels": {"severity": one.severity},
                        "annotations": {"summary": one.summary, "action": one.action},
                    }
                    for one in ALERTS
                ],
            }
        ]
    }
