"""What is trained is exported so that diffusers loads it, is measured, and gets its card."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from recipes.export import export
from recipes.figures.card import (
    folder_hashes,
    read_training,
    write_card,
    write_training,
)
from recipes.figures.evaluate import EvaluationOptions
from recipes.figures.evaluate_parts import evaluate_controlnet, evaluate_lora
from recipes.networks.controlnet import build_controlnet
from recipes.networks.denoiser import base_unet
from recipes.publish import measure
from recipes.recipe import ControlNetRecipe
from recipes.stages import CONTROLS, MODEL_STAGES, train
from tests.recipes.cards import card_hashes
from tests.recipes.tiny import TINY_STEPS, tiny_run

FEW = EvaluationOptions(
    prompts=4, prompts_elsewhere=4, prompts_bare=2, repeats=2, steps=2, guidance=1.0, batch=4
)


def finished(model: str, path: Path, base: Path) -> Path:
    """The folder of a finished tiny run of a model, with its training's record."""
    run = tiny_run(path / "run", base=base)
    assert train(run, MODEL_STAGES[model])
    folder = export(model, run, path / model)
    write_training(model, run, folder)
    return folder


def check_card(name: str, tables: str, folder: Path) -> None:
    text = write_card(name, tables, folder).read_text(encoding="utf-8")
    assert card_hashes(folder) == folder_hashes(folder)
    assert tables in text
    assert f"python -m recipes evaluate {name}" in " ".join(text.split())


@pytest.mark.parametrize(
    "model", [pytest.param("shapes-sd-light", marks=pytest.mark.slow), "shapes-sd3"]
)
def test_a_model_is_measured_in_its_plain_pipeline(
    model: str, tmp_path: Path, tiny_base: Path
) -> None:
    folder = finished(model, tmp_path, tiny_base)
    few = {name: getattr(FEW, name) for name in ("prompts", "repeats", "steps", "batch")}
    changes = {**few, "prompts_elsewhere": 4, "prompts_bare": 2}
    figures = measure(model, folder, changes=changes, report=folder)
    told = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert told["groups"]["hard"]["all"]["total"] == 8
    assert told["groups"]["oblong together"]["all"]["total"] == 4
    assert told["frechet"]["easy"]["pictures"] == 8
    assert [one.steps for one in read_training(folder)] == [TINY_STEPS.steps] * len(
        MODEL_STAGES[model]
    )
    check_card(model, figures.tables(), folder)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_controlnet_is_measured_with_and_without(
    name: str, tmp_path: Path, tiny_base: Path
) -> None:
    folder = finished(name, tmp_path, tiny_base)
    figures = evaluate_controlnet(folder, tiny_base, CONTROLS[name], options=FEW, report=folder)
    for side in (figures.with_part, figures.without):
        assert side["edge agreement (F1 within 1 px)"].total == 8
    check_card(name, figures.tables(), folder)


def test_a_lora_is_measured_with_and_without(tmp_path: Path, tiny_base: Path) -> None:
    style = "texture"
    folder = finished(style, tmp_path, tiny_base)
    weights = (folder / "pytorch_lora_weights.safetensors").stat().st_size
    assert 0 < weights < (tiny_base / "unet/diffusion_pytorch_model.safetensors").stat().st_size
    figures = evaluate_lora(folder, tiny_base, style, options=FEW, report=folder)
    assert figures.with_part["style"].total == 8
    check_card(style, figures.tables(), folder)


def test_an_untrained_controlnet_changes_nothing_and_shares_the_unets_weights(
    tiny_base: Path, tmp_path: Path
) -> None:
    unet = base_unet(tiny_run(tmp_path, base=tiny_base))
    control = build_controlnet(ControlNetRecipe("edges"), unet)
    theirs = unet.state_dict()
    shared = [name for name in control.state_dict() if name in theirs]
    assert any("resnets" in name for name in shared)
    assert all(torch.equal(control.state_dict()[name], theirs[name]) for name in shared)
    noisy, hint = torch.randn(2, 4, 16, 24), torch.rand(2, 3, 64, 96)
    hidden, steps = torch.randn(2, 32, 16), torch.tensor([10, 900])
    with torch.no_grad():
        down, middle = control(noisy, steps, hidden, hint, return_dict=False)
        plain = unet(noisy, steps, hidden).sample
        steered = unet(
            noisy,
            steps,
            hidden,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample
    assert torch.equal(cast(torch.Tensor, plain), steered)
