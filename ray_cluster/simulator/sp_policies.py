"""Sequence-parallel policies by name, as experiments and their files call them.

========================  =======================================================================
``rounds/most``           ours; ``rounds/large`` with the guard of large requests
``widest``                all GPUs to one request after the other, with preemption
``static/8-4-2-1/edf``    a degree by class, in the order of the menus; ``fcfs``, ``edf_backfill``
``fixed/8``               one degree for all, by arrival, nothing is dropped
``moldable``              the smallest degree in time, chosen when a request starts
``knapsack/5/grid``       rounds of five steps of the largest class at its widest; ``idle``,
                          ``events``
========================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import get_args

from ray_cluster.policies.baselines.sp_knapsack import Clocking, KnapsackOptions, plan_knapsack
from ray_cluster.policies.baselines.sp_static import (
    Discipline,
    StaticOptions,
    plan_moldable,
    plan_static,
)
from ray_cluster.policies.baselines.sp_widest import plan_widest
from ray_cluster.policies.sp_rounds import RoundOptions, plan_round
from ray_cluster.policies.sp_types import ROUNDING_S, DegreeMenu, Planner

_SIMPLE: Mapping[str, Planner] = {
    "rounds/most": partial(plan_round, options=RoundOptions("most")),
    "rounds/large": partial(plan_round, options=RoundOptions("large")),
    "widest": plan_widest,
    "moldable": plan_moldable,
}


def planner_of(name: str, menus: Mapping[str, DegreeMenu]) -> Planner:
    """Return the policy of a name.

    Args:
        name: see the table above.
        menus: of the classes that are served, by their names.

    Raises:
        ValueError: there is none of that name.
    """
    if name in _SIMPLE:
        return _SIMPLE[name]
    family, *values = name.split("/")
    try:
        if family == "fixed" and len(values) == 1:
            degrees = tuple((one, _count(values[0], "a degree")) for one in menus)
            return partial(plan_static, options=StaticOptions(degrees, "fcfs", drops=False))
        if family == "static" and len(values) == 2:
            numbers = [_count(one, "a degree") for one in values[0].split("-")]
            if len(numbers) != len(menus):
                raise ValueError(f"{len(menus)} degrees, one for each size; given {len(numbers)}")
            degrees = tuple(zip(menus, numbers, strict=True))
            return partial(plan_static, options=StaticOptions(degrees, _discipline(values[1])))
        if family == "knapsack" and len(values) == 2:
            step_s = max(menu.fastest_s for menu in menus.values())
            options = KnapsackOptions(
                _count(values[0], "the steps of a round") * step_s, _clocking(values[1])
            )
            return partial(plan_knapsack, options=options)
    except ValueError as error:
        raise ValueError(f"cannot read the policy {name!r}: {error}") from None
    raise ValueError(
        f"there is no policy {name!r}: choose {', '.join(_SIMPLE)}, fixed/DEGREE, "
        "static/DEGREES/ORDER or knapsack/STEPS/CLOCKING"
    )


def static_names(menus: Mapping[str, DegreeMenu], step_budget_s: Mapping[str, float]) -> list[str]:
    """Return all static policies that may be best, in every order.

    Of each class the degrees that meet its deadline alone, and the next smaller one: with it the
    class is given up.

    Args:
        menus: by class.
        step_budget_s: seconds that a step may take for a request to be on time alone, by class.
    """
    columns = [_worth_trying(menu, step_budget_s[name]) for name, menu in menus.items()]
    return [
        f"static/{'-'.join(map(str, degrees))}/{order}"
        for degrees in product(*columns)
        for order in get_args(Discipline)
    ]


def knapsack_names() -> list[str]:
    """Return the variants of published rounds: lengths, and when they begin."""
    return [f"knapsack/{steps}/{one}" for steps in (1, 2, 5) for one in get_args(Clocking)]


def fixed_names(menus: Mapping[str, DegreeMenu]) -> list[str]:
    """Return the policies of one degree for all."""
    degrees = sorted({degree for menu in menus.values() for degree in menu.degrees})
    return [f"fixed/{degree}" for degree in degrees]


def _worth_trying(menu: DegreeMenu, budget_s: float) -> tuple[int, ...]:
    most_s = budget_s + ROUNDING_S
    in_time = [level for level, seconds in enumerate(menu.step_s) if seconds <= most_s]
    first = max(0, min(in_time, default=len(menu.degrees)) - 1)
    return menu.degrees[first:]


def _count(value: str, what: str) -> int:
    if int(value) < 1:
        raise ValueError(f"{what}: at least 1; given {value}")
    return int(value)


def _discipline(value: str) -> Discipline:
    for one in get_args(Discipline):
        if value == one:
            return one  # type: ignore[no-any-return]
    raise ValueError(f"the order is one of {', '.join(get_args(Discipline))}; given {value}")


def _clocking(value: str) -> Clocking:
    for one in get_args(Clocking):
        if value == one:
            return one  # type: ignore[no-any-return]
    raise ValueError(f"the clocking is one of {', '.join(get_args(Clocking))}; given {value}")
