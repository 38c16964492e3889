"""What reports of experiments with a day of autoscaling say."""

from __future__ import annotations

from collections.abc import Mapping

from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.control_report import Figure, Form
from ray_cluster.simulator.reports import Line, Panel, Stack

_ATTAINMENT = Figure("attainment", "on time, %", 100, 2)
_HOURS = Figure("gpu_hours", "GPU-hours", 1, 1)
_FIGURES = (
    _ATTAINMENT,
    Figure("worst", "worst service, %", 100, 2),
    _HOURS,
    Figure("num_plan_changes", "changes", 1, 1),
    Figure("num_starts", "starts", 1, 1),
)


def _over_time(experiment: AutoscalingExperiment, courses: Mapping[str, Course]) -> Stack:
    first = courses[experiment.policies[0]]
    arrived = {service: Line(first.begins_s, rates) for service, rates in first.per_s.items()}
    missed = {
        policy: Line(course.begins_s, list(100 * course.missed_shares))
        for policy, course in courses.items()
    }
    loading = {policy: _loading(course) for policy, course in courses.items()}
    waiting = {policy: Line(course.times_s, course.waiting) for policy, course in courses.items()}
    return Stack(
        "over-time",
        f"{experiment.name}: seed {experiment.first_seed} over time (simulated)",
        "seconds",
        [
            Panel("requests per second", arrived),
            *(
                Panel(
                    f"{one.service}: ready",
                    {policy: _ready(course, one.service) for policy, course in courses.items()},
                )
                for one in experiment.workloads
            ),
            Panel("loading", loading),
            Panel("images waiting", waiting),
            Panel("not on time, %", missed),
        ],
    )


def _ready(course: Course, pool: str) -> Line:
    return Line(course.times_s, [state.pool(pool).num_ready for state in course.states])


def _loading(course: Course) -> Line:
    """Of all pools."""
    numbers = [sum(pool.num_loading for pool in state.pools) for state in course.states]
    return Line(course.times_s, numbers)


FORM: Form[AutoscalingExperiment] = Form(
    words="What is dropped or late is not on time. A GPU counts as long as it is held, loading or "
    "serving. Changes are rounds that start or stop replicas, starts the replicas that they ask "
    "for.",
    figures=_FIGURES,
    x=_HOURS,
    y=_ATTAINMENT,
    plot="cost",
    title="requests on time against GPU-hours",
    is_wide=False,
    bars="how many GPUs serve, load or are broken",
    over_time=_over_time,
)
