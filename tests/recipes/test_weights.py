"""Everything that ships is what its card says, and loads in diffusers' plain classes."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
)

from ray_cluster.models.builtin import builtin_folder, builtin_kinds, weights_folder
from ray_cluster.models.cascade_curves import load_calibration, load_curves
from ray_cluster.models.discriminators import load_discriminator
from ray_cluster.quality.classifier import load_classifier
from recipes.figures.card import CARD, folder_hashes, write_card
from recipes.figures.evaluate import load_pipeline
from tests.recipes.cards import card_hashes

KINDS = builtin_kinds()
# of each kind the first
FIRST = {kind: name for name, kind in reversed(KINDS.items())}.values()


def test_every_folder_is_known() -> None:
    assert {path.name for path in weights_folder().iterdir() if path.is_dir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_card_states_the_hashes_of_the_files(name: str) -> None:
    folder = weights_folder() / name
    assert folder_hashes(folder)
    assert card_hashes(folder) == folder_hashes(folder)
    if KINDS[name] not in {"quality meter", "discriminator"}:
        text = (folder / CARD).read_text(encoding="utf-8")
        assert "none left out" in text
        assert (folder / "contact-sheet.png").is_file()


@pytest.mark.parametrize("name", KINDS)
def test_writing_a_card_anew_changes_its_figures_only(name: str, tmp_path: Path) -> None:
    shutil.copytree(weights_folder() / name, tmp_path, dirs_exist_ok=True)
    committed = (tmp_path / CARD).read_text(encoding="utf-8")
    tables = committed.partition("<!-- begin quality -->\n")[2].partition("\n<!-- end")[0]
    write_card(name, tables, tmp_path)
    assert (tmp_path / CARD).read_text(encoding="utf-8") == committed


@pytest.mark.parametrize(
    "name",
    [one if one in FIRST else pytest.param(one, marks=pytest.mark.slow) for one in KINDS],
)
def test_it_loads_plainly_and_makes_a_picture(name: str) -> None:
    torch.set_num_threads(1)
    folder, base = weights_folder() / name, builtin_folder("shapes-sd")
    options = {"prompt": "a red circle", "num_inference_steps": 1, "output_type": "pt"}
    match KINDS[name]:
        case "quality meter":
            assert load_classifier(folder)(torch.zeros(1, 3, 64, 64)).shape.shape == (1, 9, 7)
            return
        case "discriminator":
            scores = load_discriminator(folder, torch.device("cpu")).scores
            assert scores(["a red circle"], torch.zeros(1, 3, 64, 64)).isfinite().all()
            assert load_calibration(folder).scorer_sha256 == ""
            assert load_curves(name).quality.lower_is_better is False
            return
        case "ControlNet":
            control = ControlNetModel.from_pretrained(folder)
            pipeline = StableDiffusionControlNetPipeline.from_pretrained(base, controlnet=control)
            options["image"] = torch.zeros(1, 3, 64, 64)
        case "LoRA":
            pipeline = StableDiffusionPipeline.from_pretrained(base)
            pipeline.load_lora_weights(folder)
        case _:
            pipeline = load_pipeline(folder)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(**options, generator=torch.Generator().manual_seed(1)).images
    assert picture.shape == (1, 3, 64, 64)
    assert picture.isfinite().all()
