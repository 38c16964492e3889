"""The update by itself, and what the tables refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.kernels.sampler_update.reference import (
    sampler_update,
)
from ray_cluster.requests import SAMPLER_NAMES
from tests.kernels.schedules import (
    SPACINGS,
    config,
)

# --- the update itself ---


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 63, 5), (1, 1, 1), (16, 7)])
def test_rows_of_a_batch_do_not_touch_each_other(shape: tuple[int, ...]) -> None:
    """Mixed samplers and steps in one call, among a row of NaN and an infinite one."""
    torch.manual_seed(0)
    tables = SamplerTables(config(clip_sample=True))
    rows = [tables.table(name, 9).coefficients[index] for index, name in enumerate(SAMPLER_NAMES)]
    coefficients = torch.stack([*rows, *rows])
    tensors = [torch.randn(len(coefficients), *shape) for _ in range(4)]
    alone = [
        sampler_update(*(one[index : index + 1] for one in (*tensors, coefficients)))
        for index in range(len(coefficients))
    ]
    tensors[0][2] = float("nan")
    tensors[1][5] = float("inf")
    together = sampler_update(*tensors, coefficients)
    for index, (latents, denoised) in enumerate(alone):
        if index not in {2, 5}:
            assert torch.equal(together[0][index], latents[0])
            assert torch.equal(together[1][index], denoised[0])
    assert not torch.isfinite(together[0][2]).any()


def test_the_inputs_stay_as_they_are() -> None:
    torch.manual_seed(0)
    coefficients = SamplerTables(config()).table("dpmpp_2m", 9).coefficients[3:5]
    tensors = [torch.randn(2, 4, 5, 3) for _ in range(4)]
    copies = [one.clone() for one in tensors]
    sampler_update(*tensors, coefficients)
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))


def test_no_noise_is_as_good_as_zeros() -> None:
    torch.manual_seed(0)
    tables = SamplerTables(config())
    coefficients = torch.stack([tables.table(name, 9).coefficients[3] for name in SAMPLER_NAMES])
    latents, output, previous = (torch.randn(len(coefficients), 4, 5, 3) for _ in range(3))
    without = sampler_update(latents, output, previous, None, coefficients)
    zeros = sampler_update(latents, output, previous, torch.zeros_like(latents), coefficients)
    assert all(torch.equal(*pair) for pair in zip(without, zeros, strict=True))


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "_class_name"),
        ({"_class_name": "EDMDPMSolverMultistepScheduler"}, "_class_name"),
        ({"_class_name": "EDMEulerScheduler"}, "_class_name"),
        ({"prediction_type": "flow_prediction"}, "prediction_type"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule"),
        ({"timestep_spacing": "cosine"}, "timestep_spacing"),
        ({"thresholding": True}, "thresholding"),
        ({"use_flow_sigmas": True}, "use_flow_sigmas"),
        ({"variance_type": "learned_range"}, "variance_type"),
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
    ],
)
def test_a_schedule_that_is_not_covered_is_refused_by_name(
    changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelUnsupported, match=word):
        SamplerTables(config() | changes)


@pytest.mark.parametrize(
    ("sampler", "num_steps", "allowed"),
    [("ddim", 0, 0), ("euler", -1, -1), ("dpmpp_2m", 999, 998), ("lcm", 51, 50)],
)
def test_more_steps_than_the_sampler_can_take_are_refused(
    sampler: Any, num_steps: int, allowed: int
) -> None:
    tables = SamplerTables(config())
    with pytest.raises(InvalidRequest) as refusal:
        tables.table(sampler, num_steps)
    assert refusal.value.param == "num_inference_steps"
    assert str(num_steps) in refusal.value.message


@pytest.mark.parametrize("sampler", ["ddim", "pndm"])
def test_an_offset_beyond_the_last_timestep_is_refused(sampler: Any) -> None:
    tables = SamplerTables(config(steps_offset=10))
    tables.table(sampler, 99)
    with pytest.raises(InvalidRequest, match="cannot take 100 steps") as refusal:
        tables.table(sampler, 100)
    assert refusal.value.param == "num_inference_steps"


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
@pytest.mark.parametrize("spacing", SPACINGS)
def test_every_number_of_steps_up_to_the_limit_gives_a_finite_schedule(
    sampler: Any, spacing: str
) -> None:
    for is_zero_snr in (False, True):
        kind = "v_prediction" if is_zero_snr else "epsilon"
        tables = SamplerTables(
            config(
                timestep_spacing=spacing, rescale_betas_zero_snr=is_zero_snr, prediction_type=kind
            )
        )
        most = tables.max_steps(sampler, 1000)
        assert most == (50 if sampler == "lcm" else 998)
        for num_steps in (1, 2, 3, 7, 31, 49, 50, 61, 77, 100, 103, 122, 333, 499, 804, 998):
            if num_steps <= most:
                table = tables.table(sampler, num_steps)
                assert table.num_calls == num_steps + (sampler == "pndm" and num_steps > 1)
                assert table.timesteps.min() >= 0
                assert torch.isfinite(table.coefficients[:, :-1]).all(), num_steps
                assert torch.isfinite(table.timesteps).all()
