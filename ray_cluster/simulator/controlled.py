"""Requests on a simulated cluster that a control loop plans for, from their first to their last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ray_cluster.control.loop import ControlLoop, RoundReport
from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.plan import Plan
from ray_cluster.policies.planner import Planner
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import SimulatedRequest


class Round(NamedTuple):
    """One round: what the loop saw, and what it did."""

    state: ClusterState
    report: RoundReport


def run_controlled(
    events: EventQueue,
    cluster: SimulatedCluster,
    planner: Planner[Any],
    jobs: Sequence[SimulatedRequest],
    *,
    initial: Plan,
    period_s: float,
    span_s: float,
) -> list[Round]:
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
    rounds: list[Round] = []

    def note(report: RoundReport) -> None:
        assert loop.state is not None
        rounds.append(Round(loop.state, report))

    loop = ControlLoop(planner, cluster, events, period_s=period_s, on_round=note, applied=initial)
    loop.start()
    for job in jobs:
        job.arrival_s += begin_s
        job.deadline_s += begin_s
    events.at_each([job.arrival_s for job in jobs], lambda place: cluster.offer(jobs[place]))
    events.run(begin_s + span_s)
    loop.stop()
    return rounds


def num_plan_changes(rounds: Sequence[Round]) -> int:
    """Return how many rounds started or stopped replicas."""
    return sum(bool(one.report.actions and one.report.actions.scales) for one in rounds)
