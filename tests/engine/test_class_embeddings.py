"""UNets with class embeddings, and with conditions made of the prompt: each call is diffusers'."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from ray_cluster.engine.loading import load_model
from ray_cluster.engine.state import Conditioning
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    call_model,
    difference,
    pixel_difference,
    pool,
    request,
    run_alone,
)
from tests.engine.reference import Reference

Record = Callable[[str, object], None]
# four times the first block's channels
TIME_WIDTH = 64
VECTOR_WIDTH = 24
SIZES = ((8, 8), (16, 16), (8, 16), (8, 8))
CLASSES: dict[str, dict[str, Any]] = {
    "number": {"num_class_embeds": 10},
    "timestep": {"class_embed_type": "timestep"},
    "identity": {"class_embed_type": "identity"},
    "projection": {
        "class_embed_type": "projection",
        "projection_class_embeddings_input_dim": VECTOR_WIDTH,
    },
    "simple_projection": {
        "class_embed_type": "simple_projection",
        "projection_class_embeddings_input_dim": VECTOR_WIDTH,
    },
}
# of SDXL; the width of what is projected is the same for both embeddings
ADDED = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 2,
    "projection_class_embeddings_input_dim": VECTOR_WIDTH,
}
TEXT = {"addition_embed_type": "text", "addition_embed_type_num_heads": 4}


def unet_with(**changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(TIME_WIDTH // 4, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=4,
        **changes,
    )
    return unet.eval()


def labels_of(kind: str) -> list[Tensor]:
    match kind:
        case "number":
            return [torch.tensor(number) for number in (3, 7, 3, 0)]
        case "timestep":
            return [torch.tensor(float(number)) for number in (20, 999, 250, 0)]
    width = TIME_WIDTH if kind == "identity" else VECTOR_WIDTH
    return [torch.randn(width, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def conditionings(kind: str | None, *, has_added: bool) -> list[Conditioning]:
    """Four requests; the second and the last are guided, the last with a label of its own."""
    torch.manual_seed(1)
    labels = labels_of(kind) if kind else [None] * len(SIZES)
    found = []
    for index, label in enumerate(labels):
        guided = index % 2 == 1
        found.append(
            Conditioning(
                torch.randn(6, 32),
                torch.randn(6, 32) if guided else None,
                torch.randn(12) if has_added else None,
                torch.randn(12) if has_added and guided else None,
                torch.tensor([64.0, 64, 0, 0, 64, 64]) if has_added else None,
                label,
                labels[0] if index == 3 else None,
            )
        )
    return found


@torch.inference_mode()
def diffusers_row(
    unet: UNet2DConditionModel, image: Tensor, timestep: Tensor, one: Conditioning, *, last: bool
) -> Tensor:
    """What diffusers predicts for a row of a request: the conditional one or the other."""
    prompt = one.prompt_embeds if last else one.negative_embeds
    pooled = one.pooled_embeds if last else one.negative_pooled_embeds
    label = one.class_labels
    if not last and one.negative_class_labels is not None:
        label = one.negative_class_labels
    assert prompt is not None
    added = {} if pooled is None else {"text_embeds": pooled[None], "time_ids": one.time_ids[None]}
    return unet(
        image[None],
        timestep,
        prompt[None],
        class_labels=None if label is None else label[None],
        added_cond_kwargs=added,
    ).sample[0]


BESIDE = {"nothing": {}, "text_time": ADDED, "text": TEXT}
# a model with neither is that of the other tests
PAIRS = [*itertools.product(CLASSES, BESIDE), (None, "text")]


@pytest.mark.parametrize(("kind", "beside"), PAIRS)
def test_a_call_is_that_of_diffusers_row_by_row(
    kind: str | None, beside: str, record: Record
) -> None:
    unet = unet_with(**(CLASSES[kind] if kind else {}) | BESIDE[beside])
    executor = UNetExecutor(copy.deepcopy(unet), vae_scale_factor=8, device=torch.device("cpu"))
    given = conditionings(kind, has_added=beside == "text_time")
    images = [torch.randn(4, *size) for size in SIZES]
    timesteps = torch.tensor([900.0, 500.0, 13.0, 250.0])
    expected = []
    for image, timestep, one in zip(images, timesteps, given, strict=True):
        output = diffusers_row(unet, image, timestep, one, last=True)
        if one.is_guided:
            blank = diffusers_row(unet, image, timestep, one, last=False)
            output = blank + 2.0 * (output - blank)
        expected.append(output)

    def gaps(conditioned: list[Conditioning]) -> list[float]:
        found = call_model(executor, images, timesteps, conditioned, [2.0] * len(images))
        return [difference(*pair) for pair in zip(found, expected, strict=True)]

    # a guided prediction multiplies both rows' rounding by up to three
    limits = [CALL_TOLERANCE * (3 if one.is_guided else 1) for one in given]
    right = gaps(given)
    record("gap", max(right))
    assert all(gap <= limit for gap, limit in zip(right, limits, strict=True))
    if kind:
        # another class, of one image: it alone is another
        other = replace(given[2], class_labels=given[1].class_labels)
        wrong = gaps([*given[:2], other, given[3]])
        record("another class", wrong[2])
        assert wrong[2] >= CONTROL_FACTOR * CALL_TOLERANCE
        assert wrong[:2] + wrong[3:] == pytest.approx(right[:2] + right[3:], abs=CALL_TOLERANCE)
        # the class of its unconditional row
        same = replace(given[3], negative_class_labels=None)
        assert gaps([*given[:3], same])[3] >= CONTROL_FACTOR * CALL_TOLERANCE


def test_a_request_without_the_class_that_its_model_takes_is_refused() -> None:
    executor = UNetExecutor(
        unet_with(num_class_embeds=10), vae_scale_factor=8, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="class_labels should be provided"):
        executor.prepare(Conditioning(torch.randn(6, 32)))


def test_classes_that_are_concatenated_are_refused_by_name() -> None:
    unet = unet_with(class_embeddings_concat=True, **CLASSES["simple_projection"])
    with pytest.raises(ModelUnsupported, match="class_embeddings_concat=True is not covered"):
        UNetExecutor(unet, vae_scale_factor=8, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "key", "value", "allowed"),
    [
        ("sd", "class_embed_type", "timestep", "None"),
        ("sdxl", "class_embed_type", "projection", "None"),
        ("sd", "num_class_embeds", 1000, "None"),
        ("sd", "addition_embed_type", "text_time", "None, 'text'"),
        ("sdxl", "addition_embed_type", "text", "'text_time'"),
    ],
)
def test_a_folder_whose_pipeline_has_no_input_for_its_unet_is_refused(
    zoo: Zoo, tmp_path: Path, name: str, key: str, value: Any, allowed: str
) -> None:
    folder = Path(shutil.copytree(zoo.folder(name), tmp_path / name))
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ModelUnsupported, match="asks for what a StableDiffusion") as error:
        load_model(pool(folder))
    assert f"{key}={value!r}" in str(error.value)
    assert allowed in str(error.value)


def test_a_condition_made_of_the_prompt_is_that_of_the_pipeline(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo.folder("sd"), tmp_path / "text"))
    unet_with(**TEXT).save_pretrained(folder / "unet")
    model, reference = load_model(pool(folder)), Reference(folder)
    one = request(num_steps=2, prompt="a large blue square")
    with torch.inference_mode():
        right, wrong = (
            model.decoder.decode([run_alone(model, this)])[0]
            for this in (one, replace(one, prompt="red"))
        )
    expected = reference.pixels_of_the_pipeline(one)
    assert pixel_difference(right, expected) <= 1
    assert pixel_difference(wrong, expected) > 1
