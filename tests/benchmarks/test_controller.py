"""The controller's benchmark: the same day for all, and an audit that finds what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.harness import Study
from benchmarks.serving.cascade import Made, cascade_of, mixed_prompts, post
from benchmarks.serving.controller import (
    ORDER,
    OURS,
    POLICIES,
    STATIC,
    Controlled,
    Day,
    Turn,
    gap,
    squeezed_day,
    tabulate,
)
from benchmarks.serving.reshapes import (
    Ended,
    Reshape,
    audit,
    changes_by_dwell,
    planned_at,
    tune,
)
from benchmarks.serving.reshapes import tabulate as tabulate_reshapes
from benchmarks.serving.services import Contender, Counts, Running
from ray_cluster.config.loading import load_config

HEAVY, LIGHT = "shapes-sd", "shapes-sd-light"
CORES = {"cores_by_role": {"model replica": 1.2}, "cores_of_others": 0.1}


def test_a_day_has_bursts_and_is_always_the_same() -> None:
    prompts = mixed_prompts(30)
    day = squeezed_day(20.0, 240.0, 2.0, prompts)
    assert day == squeezed_day(20.0, 240.0, 2.0, prompts)
    assert set(day.prompts) == set(prompts)
    per_hour = np.histogram(day.instants_s, bins=24, range=(0, 240))[0]
    assert per_hour[10:20].mean() > 4 * per_hour[1:6].mean()
    assert len(day.prompts) == len(day.instants_s)
    assert day.peak_per_s == pytest.approx(24.0)


def turn(policy: str, *right: bool | None, late: int = 0) -> Turn:
    answers = [
        Made("late" if number < late else "in time", 1.0, cascade={"stage": "heavy"}, image=b"x")
        if one is not None
        else Made("refused", 0.1)
        for number, one in enumerate(right)
    ]
    return Turn(policy, answers, list(right), 0.4, CORES)


def tabulated(*turns: Turn) -> dict[str, Any]:
    study, prompts = Study(quick=True), tuple(mixed_prompts(4))
    tabulate(study, Day((1.0, 9.9, 10.0, 35.0), prompts, 4.0, 2.0), turns, [2.0, 1.5])
    return study.found


def test_each_turn_has_a_row_and_the_same_calls_are_compared() -> None:
    good, bad = (True, True, True, False), (False, False, True, None)
    found = tabulated(turn(OURS, *good), turn(STATIC, *good), turn(STATIC, *bad), turn(OURS, *good))
    rows = found["tables"]["turns"]
    assert [row["policy"] for row in rows] == [f"{p}, turn {n}" for n, p in enumerate(ORDER, 1)]
    assert [row["refused"] for row in rows] == [0, 0, 1, 0]
    assert rows[2]["violations, %"].startswith("25.0")
    assert rows[2]["all right, %"].startswith("33.3")
    assert rows[2]["of calls right in time, %"].startswith("25.0")
    assert (rows[0]["heavy, %"], rows[0]["busy cores"]) == (100.0, 1.2)
    violated, more = found["aims"]
    assert (violated["measured"], violated["verdict"]) == (0.0, "unsure")
    assert more["measured"] == pytest.approx(100 * (4 / 8 - 6 / 8))
    over_time = [row for row in found["tables"]["over time"] if row["turn"] == f"3 {STATIC}"]
    assert [row["calls"] for row in over_time] == [2, 1, 0, 1]
    assert [row["of calls right in time, %"] for row in over_time] == [0.0, 100.0, None, 0.0]
    assert over_time[3]["heavy, %"] is None


def test_a_fixed_threshold_that_is_better_is_told() -> None:
    good = (True,) * 4
    ours = turn(OURS, *good, late=4)
    found = tabulated(ours, turn(STATIC, *good), turn(STATIC, *good), ours)
    assert [aim["verdict"] for aim in found["aims"]] == ["no", "no"]
    equal = gap([1.0, 0.0] * 50, [1.0, 0.0] * 50)
    assert (equal["low"], equal["value"], equal["high"]) == (0, 0, 0)


def test_a_caller_that_hung_up_was_answered_late_and_any_other_failure_is_one() -> None:
    fates = []
    for error in (httpx.ReadTimeout, httpx.ConnectTimeout, httpx.ReadError):

        def fail(_: httpx.Request, error: type[httpx.TransportError] = error) -> httpx.Response:
            raise error("")

        with httpx.Client(transport=httpx.MockTransport(fail), base_url="http://x") as client:
            fates.append(post(client, mixed_prompts(1)[0], 1.0).fate)
    assert fates == ["late", "failed", "failed"]


def pictures(*shades: int) -> list[Ended]:
    return [
        Ended(number, ("m", number % 2), np.full((4, 4, 3), shade, np.uint8))
        for number, shade in enumerate(shades)
    ]


def test_an_audit_accepts_calls_that_all_ended_once() -> None:
    # one unit of 255 is rounding
    assert list(audit(4, pictures(10, 99, 11, 99), Counts(4, 4, 0, 0))) == []


@pytest.mark.parametrize(
    ("num_sent", "ended", "counts", "said"),
    [
        (5, pictures(10, 99, 10, 99), Counts(4, 4, 0, 0), "1 of 5 calls never ended"),
        (4, pictures(10, 99, 10, 99), Counts(5, 4, 0, 0), "1 images were accepted and never"),
        (4, pictures(10, 99, 10, 99), Counts(5, 5, 0, 0), "completed 5 images, and clients got 4"),
        (2, pictures(10, 99) + pictures(10), Counts(3, 3, 0, 0), "the call 0 ended 2 times"),
        (4, pictures(10, 99, 12, 99), Counts(4, 4, 0, 0), "the image of call 2 is not the first"),
        (
            3,
            [*pictures(10, 99), Ended(2, ("m", 0), None, "503")],
            Counts(2, 2, 0, 0),
            "1 calls failed: 503",
        ),
    ],
)
def test_an_audit_finds_what_is_lost_failed_made_twice_or_another(
    num_sent: int, ended: Sequence[Ended], counts: Counts, said: str
) -> None:
    [problem] = audit(num_sent, ended, counts)
    assert said in problem


HISTORY: list[dict[str, Any]] = [
    {"at": 130.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
    {"at": 112.0, "took_s": 0.5, "actions": ["batch caps and thresholds"]},
    {"at": 111.0, "took_s": 0.5, "actions": [f"{HEAVY}: 2 to 1 replicas", f"{LIGHT}: 0 to 1"]},
    {"at": 90.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
]


def test_a_reshape_begins_with_the_first_round_that_plans_it() -> None:
    assert planned_at(HISTORY, HEAVY, 2, 100.0) == 129.5
    assert planned_at(HISTORY, HEAVY, 2, 80.0) == 89.5
    assert planned_at(HISTORY, HEAVY, 0, 80.0) is None
    # the light model's name begins with the heavy one's
    assert planned_at(HISTORY, LIGHT, 2, 80.0) is None
    assert changes_by_dwell(HISTORY, HEAVY, 100.0, 15.0, 3) == [1, 0, 1]
    assert changes_by_dwell(HISTORY, HEAVY, 85.0, 15.0, 1) == [1]
    study = Study(quick=True)
    tabulate_reshapes(study, [Reshape("up", 100.0, 129.5, 140.0), Reshape("up", 0.0)], [1, 0])
    [row] = study.found["tables"]["reshapes"]
    assert (row["count"], row["done"]) == (2, 1)
    assert row["from plan to done, s"]["median"] == 10.5
    assert [aim["measured"] for aim in study.found["aims"]] == [10.5, 0.5]
    assert "never done" in study.found["problems"][0]


def test_services_differ_in_their_cascades_and_controllers_alone(tmp_path: Path) -> None:
    for name, policy in POLICIES.items():
        config = load_config(Contender(change=policy.of).config(tmp_path, 18999))
        [cascade] = config.cascades
        assert config.control.enabled == (name != STATIC)
        assert cascade.threshold == (0.5 if name == STATIC else 1.0)
        assert cascade.reserve_s == 0.5
        assert [one.replicas for one in config.pools] == [1, 1]
    config = load_config(Contender(change=cascade_of).config(tmp_path, 18999))
    assert [one.reserve_s for one in config.cascades] == [0.5, None]


def test_live_settings_change_one_pool_and_the_controller(tmp_path: Path) -> None:
    change = Controlled(control={"dwell_s": 1.0}, cascade=None)
    Contender(change=change.of).command(tmp_path, 18999)
    service = Running("", tmp_path)
    tune(service, {HEAVY: {"min_replicas": 2, "max_replicas": 2}}, dwell_s=15.0)
    config = load_config(tmp_path / "service.yaml")
    heavy, light = config.pools
    assert (heavy.name, heavy.min_replicas, heavy.max_replicas) == (HEAVY, 2, 2)
    assert (light.min_replicas, light.max_replicas) == (1, None)
    assert config.control.dwell_s == 15.0
