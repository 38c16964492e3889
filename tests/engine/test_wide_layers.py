"""Without instructions for half precision, models are those of float32 with rounded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from ray_cluster.engine.adapters.weight_parts import parts_of
from ray_cluster.engine.files.folders import component_config, denoiser_name
from ray_cluster.engine.files.memory import decode_bytes, encode_bytes, step_bytes
from ray_cluster.engine.models.denoisers import build_executor
from ray_cluster.engine.models.packed_weights import packs
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.engine.models.wide_layers import computing_dtype, has_instructions, widen
from ray_cluster.engine.stages.autoencoder import ImageDecoder, in_decoders_format
from ray_cluster.engine.stages.prompt_encoder import PipelineEncoder
from ray_cluster.engine.step.state import Conditioning
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    call_model,
    difference,
    request,
)
from tests.engine.lora_sets import random_set
from tests.engine.test_memory import SHARE, allocator_peak, real_step

CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
Record = Callable[[str, object], None]


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has no instructions for half precision."""
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False, raising=False)


class Model(nn.Sequential):
    """Layers that say their dtype, as the libraries' models do."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def layers() -> list[tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(2, 8, 5, 6)
    return [
        (nn.Linear(6, 7), images),
        (nn.Linear(6, 7, bias=False), images),
        (nn.Conv2d(8, 12, 3, stride=2, padding=1), images),
        (nn.GroupNorm(4, 8), images),
        (nn.LayerNorm(6), images),
        (nn.Embedding(9, 4), torch.tensor([[0, 8, 3]])),
    ]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("plain_cpu")
def test_a_layer_is_that_of_float32_with_the_same_weights(dtype: torch.dtype) -> None:
    for layer, given in layers():
        narrow = Model(layer).to(dtype)
        truth = copy.deepcopy(narrow).float()
        assert widen(narrow, CPU) is torch.float32
        is_float = given.is_floating_point()
        rounded = given.to(dtype) if is_float else given
        for inputs in (given, rounded):
            found = narrow(inputs)
            expected = truth(inputs.float() if is_float else inputs)
            assert found.dtype is torch.float32
            assert torch.equal(found, expected)
        assert narrow.dtype is dtype


@pytest.mark.usefixtures("plain_cpu")
def test_parameters_of_layers_that_are_not_known_are_converted() -> None:
    model = Model(nn.RMSNorm(6), nn.Linear(6, 7)).to(torch.bfloat16)
    widen(model, CPU)
    assert [one.dtype for one in model.parameters()] == [torch.float32, *[torch.bfloat16] * 2]
    assert model(torch.randn(3, 6)).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_with_instructions_and_on_gpus_layers_stay_as_they_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True, raising=False)
    assert has_instructions(dtype)
    model = Model(nn.Linear(6, 7)).to(dtype)
    assert widen(model, CPU) is dtype
    assert type(model[0]) is nn.Linear
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert computing_dtype(dtype, torch.device("cuda")) is dtype
    assert computing_dtype(torch.float32, CPU) is torch.float32


def conditionings(config: Any, count: int) -> list[Conditioning]:
    """Random prompts for a denoiser."""
    torch.manual_seed(1)
    if "joint_attention_dim" in config:
        widths = config["joint_attention_dim"], config["pooled_projection_dim"]
        return [
            Conditioning(torch.randn(77, widths[0]), pooled_embeds=torch.randn(widths[1]))
            for _ in range(count)
        ]
    width = config["cross_attention_dim"]
    more: dict[str, Any] = {}
    if config.get("addition_embed_type") == "text_time":
        more = {"pooled_embeds": torch.randn(32), "time_ids": torch.zeros(6)}
    return [Conditioning(torch.randn(77, width), **more) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sdxl", "bfloat16"), ("shapes", "bfloat16"), ("sd35", "bfloat16"), ("flux", "float16")],
)
@pytest.mark.usefixtures("plain_cpu")
def test_a_model_is_that_of_float32_with_the_same_weights(
    zoo: Zoo, name: str, dtype: Any, record: Record
) -> None:
    """With LoRAs on one of the rows, too; their factors are not rounded."""
    folder, half = zoo.folder(name), getattr(torch, dtype)
    component = denoiser_name(folder)
    prompts = conditionings(component_config(folder, component), 2)
    whole = load_models(folder, torch.float32)
    outputs = []
    for weights, computes in ((half, half), (half, torch.float32), (torch.float32, torch.float32)):
        model = load_models(folder, weights)[component].to(computes)
        executor = build_executor(model, vae_scale_factor=8, device=CPU)
        loaded: Any = SimpleNamespace(executor=executor)
        added = random_set(loaded, SimpleNamespace(**{component: whole[component]})).denoiser
        torch.manual_seed(0)
        latents = [torch.randn(executor.latent_shape(8 * side, 128)) for side in (8, 16)]
        times, scales = torch.tensor([5.0, 701.0]), [1.0, 1.0]
        outputs.append(call_model(executor, latents, times, prompts, scales, [added, None]))
    found, truth, unrounded = outputs
    error = max(map(difference, found, truth))
    record(f"{name} {dtype}", error)
    assert error <= CALL_TOLERANCE
    assert max(map(difference, found, unrounded)) >= CONTROL_FACTOR / 10 * CALL_TOLERANCE


@torch.inference_mode()
@pytest.mark.usefixtures("plain_cpu")
def test_weights_stay_as_small_as_they_were(zoo: Zoo) -> None:
    pipeline = DiffusionPipeline.from_pretrained(zoo.folder("sdxl"), dtype=torch.bfloat16)
    encoder, decoder = PipelineEncoder(pipeline, CPU), ImageDecoder(pipeline.vae, CPU)
    executor = build_executor(pipeline.unet, vae_scale_factor=8, device=CPU)
    held = [part.weight.tensor for layer in executor.layers.values() for part in parts_of(layer)]
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
        held += part.parameters()
    assert {one.dtype for one in held} == {torch.bfloat16}
    assert executor.dtype is torch.float32
    # what is made of them is as small as ever on its way to others
    [conditioning] = encoder.encode([request()])
    assert conditioning.prompt_embeds.dtype is torch.bfloat16
    [pixels] = decoder.decode([torch.randn(4, 8, 8)])
    assert pixels.std() > 1


# --- the plan ---


@pytest.mark.parametrize("name", ["sd", "sdxl", "shapes"])
@pytest.mark.usefixtures("plain_cpu")
def test_the_planned_bytes_of_a_step_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    config = component_config(zoo.folder(name), "unet")
    unet = load_models(zoo.folder(name), torch.bfloat16)["unet"]
    executor: Any = build_executor(unet, vae_scale_factor=8, device=CPU)
    for side, rows in ((16, 4), (32, 2)):
        real = allocator_peak(lambda s=side, n=rows: real_step(executor, config, s, n))
        planned = step_bytes(config, (side, side), rows, torch.bfloat16)
        record(f"wide step {name} {side} x{rows}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE


@pytest.mark.parametrize("name", ["sd", "sdxl"])
@pytest.mark.usefixtures("plain_cpu")
def test_the_planned_bytes_of_coding_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    config = component_config(zoo.folder(name), "vae")
    vae = load_models(zoo.folder(name), torch.bfloat16)["vae"].eval().requires_grad_(False)
    widen(in_decoders_format(vae, CPU), CPU)
    side = 32
    latents, image = torch.randn(1, 4, side, side), torch.randn(1, 3, 4 * side, 4 * side)
    for count, work in (
        (decode_bytes, lambda: vae.decode(latents, return_dict=False)),
        (encode_bytes, lambda: vae.encode(image, return_dict=False)),
    ):
        with torch.inference_mode():
            real = allocator_peak(work)
        planned = count(config, (side, side), dtype=torch.bfloat16)
        record(f"wide {count.__name__} {name}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE


def test_a_cpu_packs_what_it_has_instructions_for(
    plain_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert [packs(one) for one in (torch.float32, *HALVES)] == [True, False, False]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not packs(torch.float32)
