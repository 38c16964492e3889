"""Scorers take time, and make images wait, only where they have replicas of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.cluster import Scorers, SimulatedCluster
from ray_cluster.simulator.events import EventQueue
from tests.simulator.clusters import FLEET, job


def test_replicas_take_images_one_by_one_in_their_order() -> None:
    events, done_s = EventQueue(), dict[str, float]()
    scorers = Scorers(events, 2, image_s=1.0)

    def score(name: str) -> None:
        scorers.score(lambda: done_s.update({name: events.now_s}))

    for name in "abc":
        score(name)
    assert scorers.num_held == 3
    events.run(1.5)
    assert scorers.num_held == 1
    score("d")
    events.run()
    assert done_s == {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.5}
    assert scorers.num_held == 0


def test_infinite_capacity_scores_at_once() -> None:
    events, scored = EventQueue(), list[float]()
    Scorers(events, None, image_s=1.0).score(lambda: scored.append(events.now_s))
    assert scored == [0.0]


def scored_apart(num_scorers: int) -> Fleet:
    (service,) = FLEET.services
    assert service.cascade is not None
    cascade = replace(service.cascade, num_scorers=num_scorers)
    return replace(FLEET, services=(replace(service, cascade=cascade),))


def test_images_wait_for_a_scorer_and_not_on_the_light_model() -> None:
    events = EventQueue()
    cluster = SimulatedCluster(events, scored_apart(1), {"gpu": 4}, np.random.default_rng(0))
    cluster.apply(PlannedSettings(1, (("light", 4), ("heavy", 2)), (CascadePlan("s", 0.5),)))
    cluster.scale("light", 1)
    cluster.scale("heavy", 1)
    events.run(100.0)
    for number, confidence in enumerate((0.9, 0.9, 0.4)):
        cluster.offer(job(number, 100.0, confidence))
    assert cluster.num_running == 3
    cluster.run_out()
    # the first alone, then two together in 4/3 s; scores of 0.5 s each, one after the other
    two_s = 101 + 4 / 3
    ends_s = [101.5, two_s + 0.5, two_s + 1.0 + 4.0]
    assert [one.finish_s for one in cluster.outcomes] == pytest.approx(ends_s)
    assert [one.answer for one in cluster.outcomes] == ["light", "light", "heavy"]
    assert cluster.num_running == 0


@pytest.mark.parametrize("num_scorers", [None, 3])
def test_an_experiment_may_have_scorers_of_its_own(num_scorers: int | None) -> None:
    given = {"kind": "cascade", "name": "a", "what": "scorers", "policies": ["allocation"]}
    experiment = CascadeExperiment.model_validate({**given, "num_scorers": num_scorers})
    (service,) = experiment.fleet().services
    assert service.cascade is not None
    assert service.cascade.num_scorers == num_scorers
