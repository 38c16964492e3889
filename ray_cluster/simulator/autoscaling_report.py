"""Tables and plots of experiments with a day of autoscaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment, AutoscalingRun
from ray_cluster.simulator.comparison import Comparison
from ray_cluster.simulator.control_choices import Choice
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.control_report import Figure, figures_of, preface, tables_of, trade_off
from ray_cluster.simulator.control_timeline import gpu_timeline
from ray_cluster.simulator.reports import Line, Panel, Report, Stack

_ATTAINMENT = Figure("attainment", "on time, %", 100, 2)
_HOURS = Figure("gpu_hours", "GPU-hours", 1, 1)
_FIGURES = (
    _ATTAINMENT,
    Figure("worst", "worst service, %", 100, 2),
    _HOURS,
    Figure("num_plan_changes", "changes", 1, 1),
    Figure("num_starts", "starts", 1, 1),
)


def report_autoscaling(
    experiment: AutoscalingExperiment, choices: Sequence[Choice], runs: Sequence[AutoscalingRun]
) -> Report:
    """Sum up all simulations of an experiment."""
    found = Comparison(tuple(run.row for run in runs))
    mean_requests = float(np.mean([run.row.num_requests for run in runs]))
    what = (
        f"{preface(experiment, experiment.profiles, mean_requests)} What is dropped or late is not "
        "on time. A GPU counts as long as it is held, loading or serving. Changes are rounds that "
        "start or stop replicas, starts the replicas that they ask for."
    )
    courses = {run.row.policy: run.course for run in runs if run.course is not None}
    first, seed = experiment.policies[0], experiment.first_seed
    timeline = gpu_timeline(
        courses[first],
        experiment.fleet(),
        experiment.num_gpus,
        title=f"{first}: how many GPUs serve, load or are broken (simulated); seed {seed}",
    )
    cost = trade_off(
        found,
        _HOURS,
        _ATTAINMENT,
        name="cost",
        title=f"{experiment.name}: GPU-hours against requests on time (simulated)",
        is_wide=False,
    )
    return Report(
        experiment.name,
        what,
        tables_of(found, _FIGURES, choices),
        [cost],
        [timeline],
        figures_of(experiment, experiment.profiles, found, _FIGURES, choices),
        [_over_time(experiment, courses)],
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
