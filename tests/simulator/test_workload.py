"""Workloads have the shares, the add-ons and the deadlines that their mix says."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.workload import (
    ADAPTER_POOR,
    SERVICE_A,
    SERVICE_B,
    AddOns,
    Kind,
    Mix,
    draw_workload,
)

KINDS = tuple(
    Kind(share, "sdxl", side, side, 50, slo_class=f"{side}")
    for share, side in ((1, 512), (2, 768), (1, 1024))
)
MIX = Mix(KINDS, slo_s=lambda kind: kind.width_px / 100)


def test_shares_and_deadlines_are_the_mixs() -> None:
    drawn = draw_workload(MIX, constant_rate(10.0, 1000.0), seed=1)
    counts = Counter(one.width_px for one in drawn)
    assert counts[768] / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert counts[512] / len(drawn) == pytest.approx(0.25, abs=0.02)
    assert all(one.slo_s == one.width_px / 100 for one in drawn)
    assert all(one.slo_class == str(one.height_px) for one in drawn)
    assert [one.arrival_s for one in drawn] == sorted(one.arrival_s for one in drawn)


def test_a_change_of_one_thing_leaves_the_others_as_they_were() -> None:
    curve = constant_rate(2.0, 200.0)
    plain = draw_workload(MIX, curve, seed=3)
    extended = draw_workload(
        replace(MIX, controlnets=SERVICE_A[0], loras=SERVICE_A[1]), curve, seed=3
    )
    assert [replace(one, controlnets=(), loras=()) for one in extended] == plain
    assert plain == draw_workload(MIX, curve, seed=3)
    assert plain != draw_workload(MIX, curve, seed=4)
    other = draw_workload(replace(MIX, kinds=KINDS[:1]), curve, seed=3)
    assert [one.arrival_s for one in other] == [one.arrival_s for one in plain]


@pytest.mark.parametrize(
    "addons", [*SERVICE_A, *SERVICE_B, *ADAPTER_POOR], ids=lambda one: f"{one.name}-{one.zipf}"
)
def test_addons_come_in_their_counts_and_never_twice(addons: AddOns) -> None:
    drawn = addons.draw(20000, np.random.default_rng(5))
    assert all(len(set(names)) == len(names) for names in drawn)
    counts = Counter(map(len, drawn))
    for count, share in enumerate(addons.count_shares):
        assert counts[count] / len(drawn) == pytest.approx(share, abs=0.015)
    first = Counter(names[0] for names in drawn if names)
    top, expected = first[f"{addons.name}-1"] / first.total(), float(addons.popularity()[0])
    assert top == pytest.approx(expected, abs=0.02)


def test_a_few_controlnets_take_nearly_all_calls_as_in_production() -> None:
    for addons, share_of_nets, share_of_calls in (
        (SERVICE_A[0], 0.11, 0.98),
        (SERVICE_B[0], 0.09, 0.95),
    ):
        top = round(share_of_nets * addons.num_distinct)
        assert float(addons.popularity()[:top].sum()) == pytest.approx(share_of_calls, abs=0.015)


def test_drawing_without_replacement_is_drawing_one_after_the_other() -> None:
    addons = AddOns("x", (0.0, 0.0, 1.0), 3, 1.0)
    drawn = Counter(addons.draw(60000, np.random.default_rng(6)))
    p = addons.popularity()
    for a in range(3):
        for b in range(3):
            if a != b:
                expected = p[a] * p[b] / (1 - p[a])
                share = drawn[(f"x-{a + 1}", f"x-{b + 1}")] / 60000
                assert share == pytest.approx(float(expected), abs=0.01)


@pytest.mark.parametrize(
    ("shares", "distinct", "message"),
    [
        ((0.5, 0.4), 5, "add up to 1"),
        ((1.2, -0.2), 5, "not be negative"),
        ((0.0, 0.0, 0.0, 1.0), 2, "can't give a request 3"),
    ],
)
def test_impossible_addons_are_refused(
    shares: tuple[float, ...], distinct: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AddOns("lora", shares, distinct, 1.0)


def test_impossible_mixes_are_refused() -> None:
    for kinds in ((), (replace(KINDS[0], share=-1.0),), (replace(KINDS[0], share=0.0),)):
        with pytest.raises(ValueError, match="mix needs"):
            Mix(kinds, slo_s=lambda _: math.inf)
