"""Requests on a simulated cluster that a control loop plans for, from their first to their last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ray_cluster.control_loop import ControlLoop, RoundReport
from ray_cluster.policies.plan import Plan
from ray_cluster.policies.planner import Planner
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import Job


def run_controlled(
    events: EventQueue,
    cluster: SimulatedCluster,
    planner: Planner[Any],
    jobs: Sequence[Job],
    *,
    initial: Plan,
    period_s: float,
    span_s: float,
) -> list[RoundReport]:
    """Have jobs come from now on, with a planning round every period; return the rounds.

    Args:
        events: the cluster's clock.
        cluster: runs the initial plan already.
        planner: decides.
        jobs: instants count from now; they are made instants of the clock.
        initial: the plan that is applied.
        period_s: from round to round.
        span_s: seconds of it all.
    """
    begin_s = events.now_s
    reports: list[RoundReport] = []
    loop = ControlLoop(
        planner, cluster, events, period_s=period_s, on_round=reports.append, applied=initial
    )
    loop.start()
    for job in jobs:
        job.arrival_s += begin_s
        job.deadline_s += begin_s
        events.at(job.arrival_s, partial(cluster.offer, job))
    events.run(begin_s + span_s)
    loop.stop()
    return reports
