"""Turns of the controller and of a fixed threshold: each beside its neighbour, and all in pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.serving.controller_comparison import OURS, STATIC
from benchmarks.serving.controller_trace import Answer, percent, rights
from benchmarks.serving.controller_turns import ORDER, Turn, section
from tests.benchmarks.controlled_cell import day, live_day


def test_each_turn_has_a_row_and_the_same_calls_are_compared() -> None:
    one = day(30.0)
    live = live_day(one)
    turns = [Turn(policy, live[policy]) for policy in ORDER]
    wrong = [replace(each, is_right=False) for each in live[STATIC].answers]
    turns[2] = Turn(STATIC, replace(live[STATIC], answers=wrong))
    found = section(one, turns, [2.0, 1.5])
    rows = found["tables"]["turns"]
    assert [row["policy"] for row in rows] == [
        f"{OURS}, turn 1",
        f"{STATIC}, turn 2",
        f"{STATIC}, turn 3",
        f"{OURS}, turn 4",
    ]
    assert [row["heavy image alone, s"] for row in rows] == [rows[0]["heavy image alone, s"]] * 4
    violated, more = found["aims"]
    assert (violated["measured"], violated["verdict"]) == (0.0, "yes")
    # in one of two turns none of its images is right, in the other as many as of ours
    assert more["measured"] == pytest.approx(-percent(rights(live[OURS].answers)) / 2, abs=0.01)
    assert more["verdict"] == "yes"
    assert {key.partition(": ")[2] for key in found["tables"]["over time"][0]} == {
        "",
        "heavy, %",
        "of calls right in time, %",
    }


def test_a_fixed_threshold_that_is_better_is_told() -> None:
    one = day(30.0)
    live = live_day(one)
    late: list[Answer] = [replace(each, fate="late") for each in live[OURS].answers]
    live[OURS] = replace(live[OURS], answers=late)
    found = section(one, [Turn(policy, live[policy]) for policy in ORDER], [2.0])
    assert [aim["verdict"] for aim in found["aims"]] == ["no", "no"]
