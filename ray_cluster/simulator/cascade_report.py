"""Tables and plots of experiments with a cascade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ray_cluster.simulator.cascade_experiment import (
    DEVICE,
    SERVICE,
    CascadeExperiment,
    CascadeRun,
)
from ray_cluster.simulator.comparison import Comparison
from ray_cluster.simulator.control_choices import Choice
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.control_report import Figure, figures_of, preface, tables_of, trade_off
from ray_cluster.simulator.control_timeline import gpu_timeline
from ray_cluster.simulator.reports import Line, Panel, Report, Stack

_VIOLATIONS = Figure("violations", "violations, %", 100, 2)
_FID = Figure("fid", "FID", 1, 2)
_FIGURES = (
    _VIOLATIONS,
    _FID,
    Figure("fid_over_time", "FID over time", 1, 2),
    Figure("deferral", "deferred, %", 100, 1),
    Figure("kept", "kept, %", 100, 2),
    Figure("num_plan_changes", "changes", 1, 1),
)


def report_cascade(
    experiment: CascadeExperiment, choices: Sequence[Choice], runs: Sequence[CascadeRun]
) -> Report:
    """Sum up all simulations of an experiment."""
    found = Comparison(tuple(run.row for run in runs))
    mean_requests = float(np.mean([run.row.num_requests for run in runs]))
    what = (
        f"{preface(experiment, experiment.profiles, mean_requests)} Dropped and late requests are "
        "violations. FID is the published table's at the mean deferral, FID over time the mean of "
        f"its values at the deferrals of every {experiment.bin_s:g} s. Kept are light answers that "
        "should have been deferred; changes are rounds that start or stop replicas."
    )
    courses = {run.row.policy: run.course for run in runs if run.course is not None}
    first, seed = experiment.policies[0], experiment.first_seed
    timeline = gpu_timeline(
        courses[first],
        experiment.fleet(),
        {DEVICE: experiment.num_gpus},
        title=f"{first}: how many GPUs have which model (simulated); seed {seed}",
    )
    quality = trade_off(
        found,
        _VIOLATIONS,
        _FID,
        name="quality",
        title=f"{experiment.name}: quality against violations (simulated)",
        is_wide=True,
    )
    return Report(
        experiment.name,
        what,
        tables_of(found, _FIGURES, choices),
        [quality],
        [timeline],
        figures_of(experiment, experiment.profiles, found, _FIGURES, choices),
        [_over_time(experiment, courses)],
    )


def _over_time(experiment: CascadeExperiment, courses: Mapping[str, Course]) -> Stack:
    first = courses[experiment.policies[0]]
    arrived = {"requests": Line(first.begins_s, first.per_s[SERVICE])}
    heavy, missed, waiting = dict[str, Line](), dict[str, Line](), dict[str, Line]()
    for policy, course in courses.items():
        heavy[policy] = Line(course.begins_s, list(100 * course.heavy_shares))
        missed[policy] = Line(course.begins_s, list(100 * course.missed_shares))
        waiting[policy] = Line(course.times_s, course.waiting)
    return Stack(
        "over-time",
        f"{experiment.name}: seed {experiment.first_seed} over time (simulated)",
        "seconds",
        [
            Panel("requests per second", arrived),
            Panel("deferred, %", heavy),
            Panel("violations, %", missed),
            Panel("images waiting", waiting),
        ],
    )
