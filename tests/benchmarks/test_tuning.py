"""Searching a part of the settings keeps the others."""

from __future__ import annotations

from benchmarks.policies.control_tune import merged, names
from ray_cluster.simulator.control_choices import TunedSettings


def test_new_choices_stand_for_old_ones_in_the_order_of_all_searches() -> None:
    (first, second, third, *_) = names()
    old = [TunedSettings(*name, {"a": 1.0}, "default") for name in (third, first)]
    new = [TunedSettings(*name, {"a": 2.0}, "search") for name in (second, third)]
    found = merged(old, new)
    assert [(one.kind, one.policy) for one in found] == [first, second, third]
    assert [one.chosen_by for one in found] == ["default", "search", "search"]
