"""Every private name of another library that we use is there, and does what it is used for."""

import inspect
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from ray._private import services
from ray.experimental import internal_kv
from ray.serve._private import constants
from torch import nn
from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor, T5EncoderModel

from ray_cluster import compat
from tests.engine.family_parts import VISION, build_tokenizer


def test_rays_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(":" in one for one in compat.ray_addresses())
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {"b:2", "a:1"})
    assert compat.ray_addresses() == ["a:1", "b:2"]


def test_the_dashboard_wants_no_headers_without_authentication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert compat.dashboard_headers() == {}


def test_what_is_called_in_a_running_ray_has_the_arguments_it_is_called_with() -> None:
    inspect.signature(services.get_webui_url_from_internal_kv).bind()
    inspect.signature(internal_kv._internal_kv_put).bind("name", "value", overwrite=False)
    inspect.signature(internal_kv._internal_kv_get).bind("name")
    assert constants.SERVE_CONTROLLER_NAME
    assert constants.SERVE_NAMESPACE


def test_names_of_a_models_authors_are_told_from_diffusers() -> None:
    model = UNet2DConditionModel(
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    own = model.state_dict()
    assert not compat.has_original_names(model, own)
    assert compat.has_original_names(model, [f"model.{name}" for name in own])


def test_pipelines_say_which_components_loras_change() -> None:
    assert set(compat.lora_components(diffusers.StableDiffusionPipeline)) == {
        "unet",
        "text_encoder",
    }
    assert "transformer" in compat.lora_components(diffusers.FluxPipeline)


def test_attention_layers_of_old_files_get_the_names_of_today() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    stored = {
        name.replace("to_q", "query").replace("to_out.0", "proj_attn"): one
        for name, one in vae.state_dict().items()
    }
    compat.rename_old_weights(vae, stored)
    assert stored.keys() == vae.state_dict().keys()
    assert not hasattr(UNet2DConditionModel, "query")


def test_classes_say_what_they_keep_in_float32() -> None:
    assert "wo" in compat.float32_modules(T5EncoderModel)
    assert compat.float32_modules(UNet2DConditionModel) == frozenset()
    assert hasattr(T5EncoderModel, "_keep_in_fp32_modules_strict")


def test_an_offloaded_layer_is_known() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layer = nn.Linear(2, 2)
    assert not compat.is_offloaded(layer)
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    assert compat.is_offloaded(layer)


def test_a_processor_does_without_videos() -> None:
    tokenizer = build_tokenizer(VISION)
    kind = compat.processor_without_torchvision("Qwen2VLProcessor")
    made = kind(Qwen2VLImageProcessorPil(), tokenizer)
    assert isinstance(made, Qwen2VLProcessor)
    text = "a<|vision_start|><|image_pad|><|vision_end|>"
    found = made(text=[text], images=[Image.new("RGB", (56, 112))], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [[1, 8, 4]]
    # a token for each four patches
    assert (found["input_ids"] == made.image_token_id).sum() == 8
    assert compat.processor_without_torchvision("CLIPProcessor") is None


def test_a_processor_that_needs_torchvision_reads_texts(tmp_path: Path) -> None:
    tokenizer, kind = build_tokenizer(), compat.processor_without_torchvision("PixtralProcessor")
    kind(tokenizer, chat_template=tokenizer.chat_template).save_pretrained(tmp_path)
    talk = [[{"role": "user", "content": "a star"}]]
    made = kind.from_pretrained(tmp_path).apply_chat_template(talk, tokenize=True, return_dict=True)
    assert made["input_ids"] == tokenizer.apply_chat_template(talk)["input_ids"]
