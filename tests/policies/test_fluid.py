"""What may be leased before a request flows ahead of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.fluid import QueueEnds, ends_s, pool_of
from ray_cluster.policies.admission.load import NO_LOAD, Amounts, amounts_of, load_of
from ray_cluster.policies.types import MOST_PASSES, RequestView
from tests.fakes import STEP_COST, replica_view, request_view

COST = replace(STEP_COST, control_share=0.5, lora_share=0.2, spared_share=0.5)
POOL = pool_of([replica_view(name, step_cost=COST) for name in ("r", "s")])

requests = st.builds(
    request_view,
    num_steps=st.integers(1, 30),
    uses_guidance=st.booleans(),
    loras=st.sampled_from([(), ("a",)]),
    controls=st.sampled_from([(), ("c",)]),
    template=st.sampled_from([None, "t"]),
    mask_ratio=st.sampled_from([0.2, 1.0]),
    num_passes=st.integers(0, MOST_PASSES),
)


def line_of(*group: RequestView) -> Amounts:
    return np.array([amounts_of(load_of(one)) for one in group]).T


def exhausted(one: RequestView) -> RequestView:
    """The same request, which is not passed over any more."""
    return replace(one, num_passes=MOST_PASSES)


@given(requests, st.lists(requests, max_size=9))
def test_a_request_ends_as_if_those_that_may_pass_it_were_there_already(
    request: RequestView, ahead: list[RequestView]
) -> None:
    before = sum((amounts_of(load_of(one)) for one in ahead), amounts_of(NO_LOAD))
    passing = request.passes_left * amounts_of(load_of(request))
    (found_s,) = ends_s(line_of(request), before, POOL)
    (truth_s,) = ends_s(line_of(exhausted(request)), before + passing, POOL)
    assert found_s == pytest.approx(truth_s)
    assert found_s >= ends_s(line_of(exhausted(request)), before, POOL)[0]


@given(st.lists(requests, min_size=1, max_size=9), requests)
def test_in_a_line_each_ends_as_it_does_behind_those_before_it(
    line: list[RequestView], first: RequestView
) -> None:
    ahead = amounts_of(load_of(first))
    found = QueueEnds(line_of(*line), POOL).after(ahead)
    for one, end_s in zip(line, found, strict=True):
        assert end_s == pytest.approx(ends_s(line_of(one), ahead, POOL)[0])
        ahead = ahead + amounts_of(load_of(one))


def test_add_ons_of_its_batch_make_a_request_later_and_masks_sooner() -> None:
    ahead = np.zeros_like(amounts_of(NO_LOAD))
    ends = {}
    for name, changes in {
        "plain": {},
        "controls": {"controls": ("c",)},
        "mask": {"template": "t", "mask_ratio": 0.5},
    }.items():
        one = exhausted(request_view(**changes))
        peer = amounts_of(load_of(one))
        ends[name] = float(ends_s(line_of(one), ahead + 2 * peer, POOL)[0])
    # 10 steps of two rows of a second each, and a tenth for all
    assert ends == pytest.approx({"plain": 21.0, "controls": 31.0, "mask": 16.0})
