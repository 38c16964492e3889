"""The panels of the dashboard: a row for what callers see, and one for each of the three loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["none", "s", "reqps", "percentunit", "bytes", "Bps"]


@dataclass(frozen=True, slots=True)
class Query:
    """A line of a panel, or several.

    Attributes:
        expr: in PromQL.
        legend: with labels in double braces.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of some series over time.

    Attributes:
        what: how it is read, and what to do when it looks bad.
    """

    title: str
    what: str
    queries: Sequence[Query]
    unit: Unit = "none"


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels of one subject."""

    title: str
    panels: Sequence[Panel]


def rate(metric: str, *labels: str) -> str:
    """Return the rate of a counter over some minutes, summed but for labels."""
    return f"sum by ({', '.join(labels)}) (rate({metric}[$__rate_interval]))"


def quantile(share: float, histogram: str, *labels: str) -> str:
    """Return a quantile of a histogram, but for labels."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le', *labels)})"


def mean(histogram: str, *labels: str) -> str:
    """Return the mean of a histogram, but for labels."""
    return f"{rate(f'{histogram}_sum', *labels)} / {rate(f'{histogram}_count', *labels)}"


ROWS: tuple[PanelRow, ...] = (
    PanelRow(
        "What callers see",
        (
            Panel(
                "Images in time",
                "Share of images made by their deadlines. Falling: more replicas, or calls that "
                "allow fewer steps.",
                (
                    Query(
                        rate('ray_cluster_deadlines_total{outcome="met"}', "model")
                        + " / "
                        + rate("ray_cluster_deadlines_total", "model"),
                        "{{model}}",
                    ),
                ),
                "percentunit",
            ),
            Panel(
                "Images by what became of them",
                "Events a second. `error` and `lost` should be at nothing.",
                (Query(rate("ray_cluster_images_total", "event"), "{{event}}"),),
                "reqps",
            ),
            Panel(
                "Calls by status",
                "Answers a second. 429 is admission at work, 5xx is not.",
                (Query(rate("ray_cluster_http_requests_total", "status"), "{{status}}"),),
                "reqps",
            ),
            Panel(
                "Time of calls, 95 %",
                "From a call to the last byte of its answer.",
                (Query(quantile(0.95, "ray_cluster_http_request_seconds", "route"), "{{route}}"),),
                "s",
            ),
        ),
    ),
    PanelRow(
        "Round loop: admission and the queue",
        (
            Panel(
                "Waiting images",
                "In the queue; those held back wait for add-ons.",
                (
                    Query("sum by (model) (ray_cluster_waiting_images)", "{{model}}"),
                    Query("sum(ray_cluster_held_back_images)", "held back"),
                ),
            ),
            Panel(
                "Oldest image",
                "Seconds that the longest-waiting image has been in the system.",
                (Query("max(ray_cluster_oldest_waiting_seconds)", "oldest"),),
                "s",
            ),
            Panel(
                "Refused images",
                "Images that were not admitted, by reason.",
                (Query(rate("ray_cluster_refused_images_total", "reason"), "{{reason}}"),),
                "reqps",
            ),
            Panel(
                "Real over predicted time",
                "Mean of what images took over what was predicted at their admission; 1 is right.",
                (Query(mean("ray_cluster_real_over_predicted", "model"), "{{model}}"),),
            ),
        ),
    ),
    PanelRow(
        "Step loop: replicas",
        (
            Panel(
                "Denoising steps",
                "Steps of images a second.",
                (
                    Query(
                        rate("ray_cluster_image_steps_total", "model", "kind"), "{{model}} {{kind}}"
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Step time",
                "Median and 95 % of a step of a batch.",
                (
                    Query(quantile(0.5, "ray_cluster_step_seconds", "model"), "{{model}} 50 %"),
                    Query(quantile(0.95, "ray_cluster_step_seconds", "model"), "{{model}} 95 %"),
                ),
                "s",
            ),
            Panel(
                "Images in a step",
                "Mean size of batches.",
                (Query(mean("ray_cluster_step_batch_images", "model"), "{{model}}"),),
            ),
            Panel(
                "Leased images and free places",
                "What replicas have, and could take.",
                (
                    Query("sum by (model) (ray_cluster_leased_images)", "{{model}} leased"),
                    Query("sum by (model) (ray_cluster_free_places)", "{{model}} free"),
                ),
            ),
            Panel(
                "ControlNets: answers",
                "95 % of the time from sending a step to its residuals, and steps not waited for.",
                (
                    Query(
                        quantile(0.95, "ray_cluster_control_answer_seconds", "controlnet"),
                        "{{controlnet}}",
                    ),
                ),
                "s",
            ),
            Panel(
                "ControlNets: what is late or asked again",
                "Steps a second. Steadily many: more replicas of the ControlNet.",
                (
                    Query(rate("ray_cluster_late_steps_total", "model"), "{{model}} late"),
                    Query(
                        rate("ray_cluster_control_retries_total", "controlnet", "reason"),
                        "{{controlnet}} {{reason}}",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "LoRAs: fetches",
                "LoRAs a second by what came of fetching them.",
                (Query(rate("ray_cluster_lora_fetch_seconds_count", "result"), "{{result}}"),),
                "reqps",
            ),
            Panel(
                "LoRAs: disk",
                "Size of all factors on each node.",
                (Query("max by (node) (ray_cluster_lora_disk_bytes)", "{{node}}"),),
                "bytes",
            ),
        ),
    ),
    PanelRow(
        "Plan loop: cascades and replicas",
        (
            Panel(
                "Images of cascades",
                "Images a second by the stage whose image was the answer.",
                (
                    Query(
                        rate("ray_cluster_cascade_images_total", "cascade", "stage"),
                        "{{cascade}} {{stage}}",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Thresholds",
                "Confidence below which images are made anew.",
                (Query("max by (cascade) (ray_cluster_cascade_threshold)", "{{cascade}}"),),
            ),
            Panel(
                "Drift of confidences",
                "Above 0.1: calibrate the discriminator anew.",
                (Query("max by (cascade) (ray_cluster_cascade_drift)", "{{cascade}}"),),
            ),
            Panel(
                "Replicas",
                "Replicas that report, by model.",
                (Query("count by (model) (ray_cluster_free_places)", "{{model}}"),),
            ),
            Panel(
                "Replicas: planned and ready",
                "By pool. Ready stays below planned: replicas do not start, and are given up after "
                "apply_timeout_s.",
                (
                    Query(
                        "max by (pool, kind) (ray_cluster_plan_replicas)",
                        "{{pool}} {{kind}}",
                    ),
                ),
            ),
            Panel(
                "Demand",
                "Images a second that are called for, as the controller estimates them.",
                (Query("max by (service) (ray_cluster_demand_per_second)", "{{service}}"),),
                "reqps",
            ),
            Panel(
                "Plans: changes",
                "In five minutes. Failures are tried again at once, rollbacks after a while.",
                (
                    Query("sum(increase(ray_cluster_plan_actions_total[5m]))", "changes"),
                    Query("sum(increase(ray_cluster_plan_failures_total[5m]))", "failures"),
                    Query("sum(increase(ray_cluster_plan_rollbacks_total[5m]))", "rollbacks"),
                ),
            ),
            Panel(
                "Plans: problems",
                "Pools whose replicas are not ready in time; 1 while demand cannot be met, and "
                "while the controller is paused.",
                (
                    Query("max(ray_cluster_plan_overdue_pools)", "pools not ready in time"),
                    Query("max(ray_cluster_plan_infeasible)", "demand cannot be met"),
                    Query("max(ray_cluster_plan_paused)", "paused"),
                ),
            ),
        ),
    ),
)
