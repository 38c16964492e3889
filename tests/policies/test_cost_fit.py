"""A step's cost is found again from figures that follow it, and says how far it is from others."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.costs.cost_fit import fit_image_cost, fit_step_cost, row_work
from ray_cluster.policies.costs.cost_model import StepWork, one_call_s, step_s
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey, SizeCount
from ray_cluster.policies.types import StepCost

KEYS = [
    OperationKey("step", side, side, batch=batch, uses_guidance=guided)
    for side in (256, 512, 1024)
    for batch in (1, 2, 8)
    for guided in (False, True)
]

MIXED_KEYS = [
    OperationKey("step", uses_guidance=guided).of_sizes(
        SizeCount(side, side, batch) for side in sides
    )
    for sides in ((256, 1024), (256, 512, 1024))
    for batch in (1, 2, 8)
    for guided in (False, True)
]


def table(cost: StepCost, *more: LatencyRow) -> LatencyProfile:
    rows = [LatencyRow(key, 1.0, "measured", "made up here") for key in KEYS]
    steps = [replace(row, seconds=step_s(cost, row_work(row))) for row in rows]
    return LatencyProfile("made", "m", "d", (*steps, *more))


@given(st.floats(1e-3, 1), st.floats(1e-3, 1), st.one_of(st.just(0.0), st.floats(1e-3, 1)))
def test_a_cost_is_found_again(fixed_s: float, linear_s: float, squared_s: float) -> None:
    cost = StepCost(fixed_s, linear_s, per_squared_megapixel_s=squared_s)
    fitted = fit_step_cost(table(cost))
    assert fitted.error.num_rows == len(KEYS)
    assert fitted.error.worst < 1e-6
    assert fitted.cost.fixed_s == pytest.approx(fixed_s, rel=1e-4)
    assert fitted.cost.per_megapixel_s == pytest.approx(linear_s, rel=1e-3, abs=1e-6)
    assert fitted.cost.per_squared_megapixel_s == pytest.approx(squared_s, rel=1e-3, abs=1e-6)
    assert fitted.cost.source == "measured"


def mixed_rows(cost: StepCost, noise: float = 0.0) -> list[LatencyRow]:
    """What steps of several sizes take in one model call, each within some noise of it."""
    rows = [LatencyRow(key, 1.0, "measured", "made up here") for key in MIXED_KEYS]
    factors = np.random.default_rng(7).lognormal(sigma=noise, size=len(rows))
    return [
        replace(row, seconds=one_call_s(cost, row_work(row)) * float(factor))
        for row, factor in zip(rows, factors, strict=True)
    ]


@given(st.floats(1e-3, 1), st.floats(1e-3, 1), st.one_of(st.just(0.0), st.floats(1e-3, 2)))
def test_what_a_further_size_costs_is_found_again(
    fixed_s: float, linear_s: float, further_s: float
) -> None:
    cost = StepCost(fixed_s, linear_s, per_further_size_s=further_s)
    fitted = fit_step_cost(table(cost, *mixed_rows(cost)))
    assert fitted.error.num_rows == len(KEYS) + len(MIXED_KEYS)
    assert fitted.error.worst < 1e-4
    scale_s = fixed_s + linear_s
    assert fitted.cost.per_further_size_s == pytest.approx(further_s, rel=1e-3, abs=1e-5 * scale_s)


def test_noise_is_averaged_out_and_leaves_the_other_terms_alone() -> None:
    cost = StepCost(0.1, 0.05, per_further_size_s=0.03)
    noisy = fit_step_cost(table(cost, *mixed_rows(cost, noise=0.03)))
    assert noisy.cost.per_further_size_s == pytest.approx(0.03, rel=0.1)
    # the rows themselves are farther off than that
    assert 0.03 < noisy.error.worst < 0.15
    without = fit_step_cost(table(cost))
    assert without.cost.per_further_size_s == 0
    assert replace(noisy.cost, per_further_size_s=0.0) == without.cost


def test_steps_of_several_sizes_alone_say_nothing_of_pixels() -> None:
    cost = StepCost(0.1, 0.05, per_further_size_s=0.03)
    with pytest.raises(ValueError, match="of one size"):
        fit_step_cost(LatencyProfile("made", "m", "d", tuple(mixed_rows(cost))))


def test_decoding_and_other_devices_are_kept_apart() -> None:
    cost = StepCost(0.1, 0.2)
    source = ("measured", "made up here")
    plain = fit_step_cost(table(cost)).cost
    more = (
        LatencyRow(OperationKey("step", 512, 512, sp_degree=4), 1e-3, *source),
        LatencyRow(OperationKey("decode", 1000, 500, batch=2), 0.3, *source),
    )
    fitted = fit_step_cost(table(cost, *more))
    assert replace(fitted.cost, decode_per_megapixel_s=0.0) == plain
    assert fitted.cost.decode_per_megapixel_s == pytest.approx(0.3)


def test_the_error_is_that_of_the_figures() -> None:
    profile = table(StepCost(0.1, 0.2))
    odd = replace(profile.rows[0], seconds=profile.rows[0].seconds * 1.5)
    error = fit_step_cost(replace(profile, rows=(odd, *profile.rows[1:]))).error
    assert 0.2 < error.worst < 0.5
    assert 0 < error.mean < error.worst


@pytest.mark.parametrize("name", ["sdxl-h100", "sd3-h100"])
def test_the_packages_tables_are_told_to_a_thousandth(name: str) -> None:
    fitted = fit_step_cost(load_profile(name))
    assert fitted.error.worst < 1e-3
    assert fitted.cost.source == "modelled"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sdxl-h100", StepCost(0.03986904517419792, 0.008455450113107034, source="modelled")),
        ("sd3-h100", StepCost(0.010000006508143158, 0.016689819208791173, source="modelled")),
    ],
)
def test_the_packages_tables_have_one_size_a_step_and_the_costs_of_old(
    name: str, expected: StepCost
) -> None:
    profile = load_profile(name)
    assert not any(row.key.beside for row in profile.rows)
    found = fit_step_cost(profile).cost
    assert (
        replace(found, fixed_s=expected.fixed_s, per_megapixel_s=expected.per_megapixel_s)
        == expected
    )
    assert found.fixed_s == pytest.approx(expected.fixed_s, rel=1e-9)
    assert found.per_megapixel_s == pytest.approx(expected.per_megapixel_s, rel=1e-9)


def test_a_table_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="flux-h100-a has no steps"):
        fit_step_cost(load_profile("flux-h100-a"))


@given(st.floats(1e-3, 9), st.floats(1e-3, 9), st.floats(0.1, 4))
def test_the_cost_of_whole_images_is_found_again(
    fixed_s: float, each_s: float, megapixels: float
) -> None:
    options = [BatchOption(batch, fixed_s + each_s * batch) for batch in (1, 2, 4, 16)]
    cost = fit_image_cost(options, megapixels)
    for one in options:
        work = StepWork(one.batch * megapixels, one.batch * megapixels**2)
        assert step_s(cost, work) == pytest.approx(one.seconds, rel=1e-5)
