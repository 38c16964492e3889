"""The coefficient tables and the batched update against each diffusers scheduler's own `step`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
)
from torch import Tensor

from ray_cluster.engine.sampler_schedules import SamplerTable
from ray_cluster.engine.samplers import SamplerTables
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.kernels.sampler_update.reference import (
    FROM_OUTPUT,
    HISTORY,
    NOISE,
    TOWARD,
    sampler_update,
)
from ray_cluster.requests import SAMPLER_NAMES

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

CALL_TOLERANCE = 2e-5
RUN_TOLERANCE = 1e-4
CONTROL_FACTOR = 100
SCHEDULERS: dict[str, Any] = {
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_ancestral": EulerAncestralDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
    "lcm": LCMScheduler,
}
NOISY = ("euler_ancestral", "lcm")
STEPS = (1, 2, 5, 8, 20, 33, 50)
SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SHAPE = (1, 4, 6, 5)


def config(**changes: Any) -> dict[str, Any]:
    """A model's own scheduler_config."""
    values: dict[str, Any] = {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": "epsilon",
        "timestep_spacing": "leading",
    }
    return dict(DDIMScheduler(**(values | changes)).config)


def model(x: Tensor, timestep: float) -> Tensor:
    """Stands in for a UNet: smooth, bounded, mixing channels, aware of the timestep."""
    mixing = torch.linspace(-0.4, 0.4, 16, dtype=x.dtype).reshape(4, 4)
    return torch.tanh(torch.einsum("ij,bjhw->bihw", mixing, x) + timestep / 1000)


def start() -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE, generator=generator), generator


def by_diffusers(settings: dict[str, Any], sampler: str, num_steps: int) -> Tensor:
    scheduler = SCHEDULERS[sampler].from_config(settings)
    scheduler.set_timesteps(num_steps)
    x, generator = start()
    x = x * scheduler.init_noise_sigma
    extra = {"generator": generator} if sampler in NOISY else {}
    for timestep in scheduler.timesteps:
        output = model(scheduler.scale_model_input(x, timestep), float(timestep))
        x = scheduler.step(output, timestep, x, return_dict=False, **extra)[0]
    return x


def by_table(table: SamplerTable, dtype: torch.dtype = torch.float32) -> Tensor:
    x, generator = start()
    x = x.to(dtype) * table.init_noise_sigma
    history = torch.zeros_like(x)
    for index in range(table.num_steps):
        output = model(x * table.input_scale[index].to(dtype), float(table.timesteps[index]))
        noise = torch.zeros(SHAPE)
        if table.takes_noise[index]:
            noise = torch.randn(SHAPE, generator=generator)
        x, history = sampler_update(
            x, output, history, noise.to(dtype), table.coefficients[index : index + 1]
        )
    return x


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, of large values relative to them."""
    worst = float(((one - other).abs() / other.abs().clamp(min=1.0)).max())
    return float("inf") if math.isnan(worst) else worst


def cases() -> list[Any]:
    found = []
    for prediction in PREDICTIONS:
        for spacing in SPACINGS:
            for is_zero_snr in (False, True):
                if is_zero_snr and prediction == "epsilon":
                    continue
                settings = config(
                    prediction_type=prediction,
                    timestep_spacing=spacing,
                    rescale_betas_zero_snr=is_zero_snr,
                )
                name = f"{prediction}-{spacing}{'-zero_snr' if is_zero_snr else ''}"
                found.append(pytest.param(settings, id=name))
    return found


def is_rounded_by_diffusers(settings: dict[str, Any], sampler: str) -> bool:
    return bool(settings["rescale_betas_zero_snr"]) and sampler.startswith("euler")


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
@pytest.mark.parametrize("settings", cases())
def test_a_whole_schedule_equals_the_schedulers_own_steps(
    settings: dict[str, Any], sampler: Any
) -> None:
    tables = SamplerTables(settings)
    if sampler not in tables.names:
        with pytest.raises(InvalidRequest, match="not defined for models that predict the sample"):
            tables.table(sampler, 5)
        return
    if is_rounded_by_diffusers(settings, sampler):
        pytest.skip("has a test of its own: diffusers starts from sigma 4096 in float32")
    for num_steps in STEPS:
        expected = by_diffusers(settings, sampler, num_steps)
        found = by_table(tables.table(sampler, num_steps))
        tolerance = CALL_TOLERANCE if num_steps <= 20 else RUN_TOLERANCE
        assert gap(found, expected) <= tolerance, num_steps


def euler_in_float64(settings: dict[str, Any], sampler: str, num_steps: int) -> Tensor:
    """Both Euler samplers for v-prediction and sample prediction, their formulas written out."""
    scheduler = SCHEDULERS[sampler].from_config(settings)
    scheduler.set_timesteps(num_steps)
    sigmas = scheduler.sigmas.double()
    x, generator = start()
    x = x.double() * float(scheduler.init_noise_sigma)
    for sigma, end, timestep in zip(sigmas, sigmas[1:], scheduler.timesteps, strict=False):
        output = model(x / (sigma**2 + 1).sqrt(), float(timestep))
        clean = output
        if settings["prediction_type"] == "v_prediction":
            clean = x / (sigma**2 + 1) - output * sigma / (sigma**2 + 1).sqrt()
        fresh, noise = torch.zeros(()), torch.zeros(())
        if sampler == "euler_ancestral":
            fresh = end * (1 - (end / sigma) ** 2).sqrt()
            noise = torch.randn(SHAPE, generator=generator).double()
        target = (end**2 - fresh**2).clamp(min=0).sqrt()
        x = x + (x - clean) / sigma * (target - sigma) + fresh * noise
    return x


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize(
    ("sampler", "prediction"),
    [("euler", "v_prediction"), ("euler", "sample"), ("euler_ancestral", "v_prediction")],
)
def test_from_infinite_noise_the_update_is_nearer_to_the_truth_than_diffusers(
    sampler: Any, prediction: str, spacing: str
) -> None:
    """float32 at sigma 4096 is 2e-4 coarse; diffusers adds and takes away numbers of that size."""
    settings = config(
        prediction_type=prediction, timestep_spacing=spacing, rescale_betas_zero_snr=True
    )
    tables = SamplerTables(settings)
    for num_steps in STEPS:
        truth = euler_in_float64(settings, sampler, num_steps)
        ours = gap(by_table(tables.table(sampler, num_steps)).double(), truth)
        theirs = gap(by_diffusers(settings, sampler, num_steps).double(), truth)
        assert ours <= max(theirs, CALL_TOLERANCE), num_steps
        # and the formulas written out here are those of diffusers
        assert theirs <= 5e-3, num_steps


@pytest.mark.parametrize("sampler", ["ddim", "lcm"])
@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_clipped_estimates_are_clipped_as_the_scheduler_does(sampler: Any, limit: float) -> None:
    for prediction in PREDICTIONS:
        settings = config(prediction_type=prediction, clip_sample=True, clip_sample_range=limit)
        expected = by_diffusers(settings, sampler, 7)
        assert gap(by_table(SamplerTables(settings).table(sampler, 7)), expected) <= CALL_TOLERANCE
        if prediction == "sample" and limit == 1.0:
            # this model's own outputs are within the limit
            continue
        unclipped = SamplerTables(settings | {"clip_sample": False}).table(sampler, 7)
        assert gap(by_table(unclipped), expected) >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"use_karras_sigmas": True},
        {"use_exponential_sigmas": True},
        {"final_sigmas_type": "sigma_min"},
        {"interpolation_type": "log_linear"},
        {"euler_at_final": True},
        {"lower_order_final": False},
        {"use_lu_lambdas": True},
        {"set_alpha_to_one": True, "steps_offset": 0},
        {"beta_schedule": "linear"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"num_train_timesteps": 500},
        {"algorithm_type": "sde-dpmsolver++", "solver_order": 3},
    ],
    ids=str,
)
def test_options_of_a_models_own_config_are_honoured_as_by_the_scheduler(
    changes: dict[str, Any],
) -> None:
    settings = config() | changes
    for sampler in SAMPLER_NAMES:
        expected = settings
        if sampler == "dpmpp_2m":
            # the sampler's name says which solver it is, whatever the model was saved with
            expected = settings | {"algorithm_type": "dpmsolver++", "solver_order": 2}
        for num_steps in (3, 16):
            found = by_table(SamplerTables(settings).table(sampler, num_steps))
            assert gap(found, by_diffusers(expected, sampler, num_steps)) <= CALL_TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_wrong_tables_show(sampler: Any) -> None:
    """A wrong timestep, each coefficient off by a step, a lost history, a lost noise."""
    settings = config(prediction_type="v_prediction", timestep_spacing="trailing")
    table = SamplerTables(settings).table(sampler, 8)
    expected = by_diffusers(settings, sampler, 8)
    wrong = {
        "timestep": replace(table, timesteps=table.timesteps - 50),
        "order": replace(table, coefficients=table.coefficients.flip(0)),
        "shift": replace(table, coefficients=table.coefficients.roll(1, dims=0)),
        "output": replace(table, coefficients=without(table, FROM_OUTPUT)),
        "estimate": replace(table, coefficients=without(table, TOWARD)),
    }
    if sampler == "dpmpp_2m":
        wrong["history"] = replace(table, coefficients=without(table, HISTORY))
    if sampler in NOISY:
        wrong["noise"] = replace(table, coefficients=without(table, NOISE))
        wrong["no draws"] = replace(table, takes_noise=(False,) * 8)
    assert gap(by_table(table), expected) <= CALL_TOLERANCE
    for name, each in wrong.items():
        assert gap(by_table(each), expected) >= CONTROL_FACTOR * CALL_TOLERANCE, name


def without(table: SamplerTable, column: int) -> Tensor:
    coefficients = table.coefficients.clone()
    coefficients[:, column] = 0
    return coefficients


@pytest.mark.parametrize("num_steps", [61, 103, 122])
def test_a_timestep_too_many_is_left_out_where_it_would_spoil_the_image(num_steps: int) -> None:
    """diffusers schedules one more, -1, and DDIM takes that for the last one: pure noise."""
    settings = config(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True
    )
    theirs = DDIMScheduler.from_config(settings)
    theirs.set_timesteps(num_steps)
    assert int(theirs.timesteps[-1]) == -1
    tables = SamplerTables(settings)
    table = tables.table("ddim", num_steps)
    assert table.num_steps == num_steps
    neighbour = by_table(tables.table("ddim", num_steps - 1))
    assert gap(by_table(table), neighbour) < 0.1
    assert gap(by_diffusers(settings, "ddim", num_steps), neighbour) > 1.0


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
        for num_steps in (1, 2, 3, 7, 31, 49, 50, 77, 100, 333, 804, 998):
            if num_steps <= most:
                table = tables.table(sampler, num_steps)
                assert table.num_steps >= 1
                assert torch.isfinite(table.coefficients[:, :-1]).all(), num_steps
                assert torch.isfinite(table.timesteps).all()
