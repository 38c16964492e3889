"""The planned memory of a diffusion transformer's step is what the allocator gives out for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from ray_cluster.engine.files.folders import component_config
from ray_cluster.engine.files.memory import model_need, step_bytes
from ray_cluster.engine.models.denoisers import build_executor
from ray_cluster.engine.models.offload import place_weights
from ray_cluster.engine.step.state import Conditioning
from tests.engine.conftest import Zoo
from tests.engine.dits import MixedCall
from tests.engine.harness import CALL_TOLERANCE, call_model, difference
from tests.engine.test_memory import SHARE, allocator_peak

Record = Callable[[str, object], None]
TOKENS = {"sd3": 77 + 256, "sd35": 77 + 256, "flux": 512, "kontext": 512}


@pytest.mark.parametrize("name", TOKENS)
def test_the_planned_bytes_of_a_step_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    config = component_config(zoo.folder(name), "transformer")
    executor = zoo.model(name).executor
    seen = ((24, 16),) if name == "kontext" else ()
    conditioning = Conditioning(
        torch.randn(TOKENS[name], config["joint_attention_dim"]),
        pooled_embeds=torch.randn(config["pooled_projection_dim"]),
        references=tuple(torch.randn(8, *size) for size in seen),
    )
    for side, rows in ((16, 4), (32, 2), (32, 6)):
        latents = [torch.randn(8, side, side)] * rows
        timesteps = torch.full((rows,), 500.0)

        def call(images: Any = latents, times: Any = timesteps, count: int = rows) -> Any:
            _forget_positions(executor)
            return call_model(executor, images, times, [conditioning] * count, [1.0] * count)

        real = allocator_peak(call)
        planned = step_bytes(config, (side, side), rows, references=seen)
        record(f"step {name} {side} x{rows}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE


def _forget_positions(executor: Any) -> None:
    """Have them made again: what is kept from one step to the next is planned for too."""
    if hasattr(executor._lean, "_positions"):
        executor._lean._positions._kept.clear()


def test_a_request_whose_guidance_is_an_input_needs_one_row(zoo: Zoo) -> None:
    sizes = [(64, 64)]
    rows = {
        name: step_bytes(component_config(zoo.folder(name), "transformer"), (16, 16), 1)
        for name in ("sd3", "flux", "kontext")
    }
    need = {
        name: model_need(zoo.folder(name), sizes, torch.float32, 4).activation_by_size[64, 64]
        for name in rows
    }
    assert need["sd3"].per_row_bytes > 1.5 * rows["sd3"]
    assert need["flux"].per_row_bytes < 1.2 * rows["flux"]
    # every row may look at a picture of 64 x 64 px
    assert need["kontext"].per_row_bytes > 1.05 * rows["kontext"]


@pytest.mark.parametrize("name", ["sd35", "flux"])
def test_offloaded_weights_predict_the_same(zoo: Zoo, name: str, record: Record) -> None:
    """Each part brings its own weights, and what is no parameter but a buffer: positions."""
    device = torch.device("cpu")
    pipeline = DiffusionPipeline.from_pretrained(zoo.folder(name))
    place_weights(pipeline, device, "all")
    assert {each.device.type for each in pipeline.transformer.parameters()} == {"meta"}
    executor = build_executor(
        pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor, device=device
    )
    call = MixedCall.of(zoo.model(name), count=5)
    images = (call.latents, call.timesteps, call.conditionings, call.scales)
    pairs = zip(call_model(executor, *images), call.run(zoo.model(name)), strict=True)
    error = max(difference(*pair) for pair in pairs)
    record("offloaded", error)
    assert error <= CALL_TOLERANCE
    assert {each.device.type for each in pipeline.transformer.parameters()} == {"meta"}
