"""Sequence-parallel policies by name; docs/simulator.md describes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import get_args

from ray_cluster.policies.baselines.sp_knapsack import Clocking, KnapsackOptions, plan_knapsack
from ray_cluster.policies.baselines.sp_static import (
    Discipline,
    StaticOptions,
    plan_moldable,
    plan_static,
)
from ray_cluster.policies.baselines.sp_widest import plan_widest
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, Planner

_SIMPLE: Mapping[str, Planner] = {
    "rounds/most": partial(plan_round, options=RoundOptions("most")),
    "rounds/large": partial(plan_round, options=RoundOptions("large")),
    "widest": plan_widest,
    "moldable": plan_moldable,
}


def planner_of(name: str, menus: Mapping[str, DegreeMenu]) -> Planner:
    """Return the policy of a name.

    Args:
        name: such as ``rounds/most``, ``fixed/8``, ``static/8-4-2-1/edf`` or ``knapsack/5/grid``.
        menus: of the classes that are served, by their names.

    Raises:
        ValueError: there is none of that name.
    """
    if name in _SIMPLE:
        return _SIMPLE[name]
    try:
        match name.split("/"):
            case ["fixed", degree]:
                degrees = tuple((one, _count(degree, "a degree")) for one in menus)
                return partial(plan_static, options=StaticOptions(degrees, "fcfs", drops=False))
            case ["static", numbers, order]:
                counts = [_count(one, "a degree") for one in numbers.split("-")]
                if len(counts) != len(menus):
                    raise ValueError(
                        f"{len(menus)} degrees, one for each size; given {len(counts)}"
                    )
                _check(order, get_args(Discipline), "order")
                degrees = tuple(zip(menus, counts, strict=True))
                options = StaticOptions(degrees, order)  # type: ignore[arg-type]
                return partial(plan_static, options=options)
            case ["knapsack", steps, clocking]:
                round_s = _count(steps, "the steps of a round") * max(
                    menu.fastest_s for menu in menus.values()
                )
                _check(clocking, get_args(Clocking), "clocking")
                knapsack = KnapsackOptions(round_s, clocking)  # type: ignore[arg-type]
                return partial(plan_knapsack, options=knapsack)
    except ValueError as error:
        raise ValueError(f"cannot read the policy {name!r}: {error}") from None
    raise ValueError(
        f"there is no policy {name!r}: choose {', '.join(_SIMPLE)}, fixed/DEGREE, "
        "static/DEGREES/ORDER or knapsack/STEPS/CLOCKING"
    )


def _count(value: str, what: str) -> int:
    if int(value) < 1:
        raise ValueError(f"{what}: at least 1; given {value}")
    return int(value)


def _check(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise ValueError(f"the {what} is one of {', '.join(known)}; given {value}")
