"""What policies cost can be measured, in part and at any size."""

import re

import numpy as np
import pytest

from benchmarks.policies.costs import CROWDS, NUM_GPUS, POLICIES, Crowd, draw_group, main
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.sp_workload import FLUX_CLASSES, menus_of


def test_every_policy_is_timed_on_every_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "decisions", "--decisions", "2", "--requests", "6"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("CPU ms")
    assert len(lines) == len(POLICIES) * len(CROWDS)
    assert all(float(one) > 0 for line in lines for one in line.split()[-3:])


def test_a_fleets_requests_all_end_and_its_figures_say_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--only", "fleet", "--fleet-requests", "40", "--fleet-groups", "3"])
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"40 requests in \d+ simulated s on 3 groups: .* on time \(simulated\)$", line)


@pytest.mark.parametrize("crowd", CROWDS, ids=[crowd.name for crowd in CROWDS])
def test_groups_that_are_timed_hold_no_more_gpus_than_there_are(crowd: Crowd) -> None:
    menus = menus_of(load_profile("flux-h100-a"), FLUX_CLASSES, num_gpus=NUM_GPUS)
    group = draw_group(crowd, menus, 20, np.random.default_rng(1))
    assert len(group.requests) == 20
    assert 0 < sum(one.degree for one in group.requests) <= NUM_GPUS
    assert {int(one.menu.slo_class) for one in group.requests} <= set(crowd.sides_px)
