"""What is planned for a model of more than 1 GB is what a process takes that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from tests.engine.checkpoints import Kind, save_checkpoint, text_encoder, tokenizer_of

Record = Callable[[str, object], None]

_WITHIN = 0.10
# run apart: the tests' own process keeps what others took
_PROGRAM = """
import gc, json, sys, threading, time
import psutil, torch
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.models.loading import inspect_model, load_model, plan_model
from ray_cluster.engine.stages.warmup import prepare_threads
from tests.engine.harness import request, run_alone

prepare_threads(1)
pool = PoolConfig(name="m", model=sys.argv[1], dtype=sys.argv[2], max_px=512, max_batch=1,
                  defaults={"size": "512x512"})
plan = plan_model(pool, inspect_model(pool))
gc.collect()
resident = lambda: psutil.Process().memory_info().rss
before, most, ended = resident(), [0], threading.Event()

def watch():
    while not ended.wait(0.005):
        most[0] = max(most[0], resident())

model = load_model(pool)
loaded = resident() - before
threading.Thread(target=watch, daemon=True).start()
one = request(num_steps=2, sampler="euler", width_px=512, height_px=512)
latents = run_alone(model, one)
with torch.inference_mode():
    model.decoder.decode([latents])
ended.set()
print(json.dumps([plan.weights_bytes, loaded, plan.peak_bytes, most[0] - before]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SDXL of its own widths, and few layers: as a folder, and as a checkpoint in one file."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("large")
    unet = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(5, 10, 20),
        use_linear_projection=True,
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        scaling_factor=0.13025,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=vae,
        unet=unet,
        text_encoder=text_encoder(CLIPTextModel, "quick_gelu", 2, 768),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, "gelu", 2, 1280),
        tokenizer=tokenizer_of(root, "<|endoftext|>"),
        tokenizer_2=tokenizer_of(root, "!"),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    ).to(dtype=torch.float16)
    pipeline.save_pretrained(root / "folder")
    save_checkpoint(root / "model.safetensors", pipeline, Kind("sdxl", torch.float16))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["folder", "model.safetensors"])
def test_a_large_model_takes_what_was_planned(
    large: Path, name: str, dtype: str, record: Record
) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(large / name), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    weights, loaded, planned, taken = json.loads(answer.stdout.splitlines()[-1])
    record(f"weights {name} {dtype}", loaded / weights)
    record(f"peak {name} {dtype}", taken / planned)
    assert weights > 1e9
    assert loaded == pytest.approx(weights, rel=_WITHIN)
    assert taken == pytest.approx(planned, rel=_WITHIN)
