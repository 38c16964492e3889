"""Reuse across steps: every row is as if alone, and exact ones are untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.reuse_steps import ActivationStore
from ray_cluster.engine.unet import parts
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.engine.harness import CONTROL_FACTOR, RUN_TOLERANCE, difference, request
from tests.engine.reusing import Company, Visit, visits
from tests.examples import a_few

Record = Callable[[str, object], None]
SIZES_PX = ((64, 64), (96, 64), (128, 128))


def mixed_visits(model: LoadedModel) -> list[Visit]:
    """Rows of all sizes, cuts and phases, guided and not, with exact ones between them."""
    cuts = list(model.executor.num_outer)
    found = []
    for index in range(8):
        width, height = SIZES_PX[index % 3]
        one = request(
            f"v{index}",
            width_px=width,
            height_px=height,
            seed=index,
            guidance_scale=(1.0, 3.0)[index % 2],
            num_steps=5 + index % 2,
        )
        cut = cuts[index % len(cuts)]
        reuse = None if index % 4 == 3 else ReuseSchedule(cut, 2 + index % 3)
        found.append(Visit(one, reuse, joins=index // 3))
    return found


def test_rows_that_reuse_are_as_if_alone_in_a_mixed_batch(company: Company, record: Record) -> None:
    visits = mixed_visits(company.model)
    run = company.run(visits)
    gaps = [company.gap(visit, run.latents(visit.one.request_id)) for visit in visits]
    record("gap", max(gaps))
    assert max(gaps) <= RUN_TOLERANCE


def test_a_schedule_of_full_steps_is_exact_and_reuse_is_not(company: Company) -> None:
    one = request("alone", num_steps=6)
    exact = company.alone(one, None)
    for cut in company.model.executor.num_outer:
        assert difference(company.alone(one, ReuseSchedule(cut, 1)), exact) == 0
        reused = difference(company.alone(one, ReuseSchedule(cut, 3)), exact)
        assert reused >= CONTROL_FACTOR * RUN_TOLERANCE


def test_blocks_in_which_no_row_is_active_are_skipped(
    small: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an SD-like UNet, two resnets run where one skip connection is outside, not all."""
    counts = [0]
    resnet = parts.Resnet.__call__

    def counted(*arguments: Any) -> Tensor:
        counts[-1] += 1
        return resnet(*arguments)

    monkeypatch.setattr(parts.Resnet, "__call__", counted)
    engine = small.engine()
    for index in range(2):
        one = request(f"r{index}", num_steps=3, width_px=64 + 32 * index)
        engine.add(small.state(Visit(one, ReuseSchedule(1, 3))))
    reused = []
    with torch.inference_mode():
        while len(engine):
            reused.append(engine.step().num_reused)
            counts.append(0)
    assert reused == [0, 2, 2]
    num_all, *rest = counts[:-1]
    assert num_all > 4
    assert rest == [1, 1]


REUSES = st.one_of(st.none(), st.builds(ReuseSchedule, st.integers(1, 5), st.integers(2, 4)))


@a_few  # each is a run of a model
@given(
    visits(SIZES_PX, reuses=REUSES),
    st.sampled_from([None, 0, 200_000]),
    st.sampled_from(["mixed", "grouped"]),
)
def test_whoever_comes_and_goes_and_whatever_is_evicted_every_row_is_as_if_alone(
    small: Company, some: list[Visit], budget_bytes: int | None, layout: Any
) -> None:
    small.check_all(some, budget_bytes, layout)


def test_exact_rows_are_bit_for_bit_what_they_are_beside_exact_ones(small: Company) -> None:
    """In full steps of the others the batch is the same; it differs only where these reuse."""
    pair = [request(f"r{i}", num_steps=4, seed=i) for i in range(2)]
    never = ReuseSchedule(2, 1)
    expected = small.run([Visit(pair[0], None), Visit(pair[1], None)]).latents("r0")
    found = small.run([Visit(pair[0], None), Visit(pair[1], never)]).latents("r0")
    assert difference(found, expected) == 0


def test_a_row_that_cannot_keep_its_step_fails_alone_and_no_other_steps_twice(
    small: Company,
) -> None:
    class Full(ActivationStore):
        def put(self, request_id: str, *args: Any) -> None:
            if request_id == "r1":
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().put(request_id, *args)

    rows = [
        Visit(request(f"r{i}", num_steps=4, seed=i, guidance_scale=1.0), ReuseSchedule(2, 2))
        for i in range(3)
    ]
    run = small.run(rows, Full())
    assert run.failed.keys() == {"r1"}
    assert run.batch_sizes[:2] == [3, 2]
    for visit in (rows[0], rows[2]):
        assert small.gap(visit, run.latents(visit.one.request_id)) <= RUN_TOLERANCE
