"""Menus, requests and views of groups of GPUs that tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.fluid import Work
from ray_cluster.policies.sequence_parallel.types import (
    DegreeMenu,
    GroupRequest,
    GroupView,
    menu_of,
)

# seconds per step: small ones gain little from more GPUs, large ones nearly all there is
SMALL = menu_of("small", {1: 1.0, 2: 0.8, 4: 0.7}, num_gpus=4, work=1.0)
MIDDLE = menu_of("middle", {1: 4.0, 2: 2.2, 4: 1.4}, num_gpus=4, work=4.0)
LARGE = menu_of("large", {1: 12.0, 2: 6.1, 4: 3.1}, num_gpus=4, work=12.0)
MENUS = (SMALL, MIDDLE, LARGE)


def request(request_id: int = 0, menu: DegreeMenu = SMALL, **changes: float) -> GroupRequest:
    values = {"steps_left": 4, "arrival_s": 0.0, "deadline_s": 100.0, **changes}
    return GroupRequest(request_id, menu, **values)  # type: ignore[arg-type]


def view(
    *requests: GroupRequest, num_gpus: int = 4, now_s: float = 0.0, switch_s: float = 0.0
) -> GroupView:
    return GroupView(num_gpus, now_s, requests, switch_s)


def works_by_deadline(requests: list[GroupRequest]) -> list[Work]:
    """What is left of requests that wait, in the order of their deadlines."""
    works = [
        Work(place, one.menu, float(one.steps_left), one.due_s)
        for place, one in enumerate(requests)
    ]
    return sorted(works, key=lambda work: (work.due_s, work.row))


def requests_strategy(max_size: int, num_gpus: int = 4) -> st.SearchStrategy[list[GroupRequest]]:
    """Waiting requests, each of which could be on time alone, most of them not all together."""
    drawn = st.tuples(st.sampled_from(MENUS), st.integers(1, 8), st.floats(1.0, 4.0))
    return st.lists(drawn, min_size=1, max_size=max_size).map(
        lambda items: [
            request(
                number, menu, steps_left=steps, deadline_s=steps * menu.fastest_s * slack + 1e-6
            )
            for number, (menu, steps, slack) in enumerate(items)
        ]
    )
