"""What reports of experiments with a cascade say."""

from __future__ import annotations

from collections.abc import Mapping

from ray_cluster.simulator.cascade_experiment import SERVICE, CascadeExperiment
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.control_report import Figure, Form
from ray_cluster.simulator.reports import Line, Panel, Stack

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


FORM: Form[CascadeExperiment] = Form(
    words="Dropped and late requests are violations. FID is the published table's at the mean "
    "deferral, FID over time the mean of its values at the deferrals of every bin. Kept are light "
    "answers that should have been deferred; changes are rounds that start or stop replicas.",
    figures=_FIGURES,
    x=_VIOLATIONS,
    y=_FID,
    plot="quality",
    title="quality against violations",
    is_wide=True,
    bars="how many GPUs have which model",
    over_time=_over_time,
)
