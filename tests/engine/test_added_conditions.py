"""UNets with conditions beside the prompt: made of it, or refused where no pipeline gives them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from ray_cluster.engine.models.loading import load_model
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.harness import load, pixel_difference, pool, request, run_alone
from tests.engine.reference import Reference


def unet_with(**changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=4,
        **changes,
    )
    return unet.eval()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("sd", "text_time", "None, 'text'"), ("sdxl", "text", "'text_time'")],
)
def test_a_folder_whose_pipeline_has_no_input_for_its_unet_is_refused(
    zoo: Zoo, tmp_path: Path, name: str, value: str, allowed: str
) -> None:
    folder = Path(shutil.copytree(zoo.folder(name), tmp_path / name))
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"addition_embed_type": value}))
    with pytest.raises(ModelUnsupported, match="asks for what a StableDiffusion") as error:
        load_model(pool(folder))
    assert allowed in str(error.value)


def test_a_condition_made_of_the_prompt_is_that_of_the_pipeline(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo.folder("sd"), tmp_path / "text"))
    unet = unet_with(addition_embed_type="text", addition_embed_type_num_heads=4)
    unet.save_pretrained(folder / "unet")
    model, reference = load(pool(folder)), Reference(folder)
    one = request(num_steps=2, prompt="a large blue square")
    with torch.inference_mode():
        right, wrong = (
            model.decoder.decode([run_alone(model, this)])[0]
            for this in (one, replace(one, prompt="red"))
        )
    expected = reference.pixels_of_the_pipeline(one)
    assert pixel_difference(right, expected) <= 1
    assert pixel_difference(wrong, expected) > 1
