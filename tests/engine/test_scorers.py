"""Discriminators are loaded whole or refused in one line, and score each image by itself."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, CLIPModel

from ray_cluster.engine.scorers.loading import load_scorer, load_uncalibrated
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.imaging.small_images import pixels_of
from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS
from ray_cluster.models.cascade_curves import Calibration, save_calibration
from ray_cluster.models.local import scorer_digest
from ray_cluster.quality.suite import suite_prompts
from recipes.networks.tokenizer import build_tokenizer, tokenise
from tests.engine.scorers import KINDS, rendered_images, save_scorer

CPU = torch.device("cpu")
# the first three are the images' own
PROMPTS = [one.caption for one in suite_prompts("easy", 3)]
PROMPTS += [f"a {colour} circle" for colour in ("red", "green", "blue")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, calibrated by hand."""
    found = {}
    for kind in KINDS:
        folder = save_scorer(tmp_path_factory.mktemp(kind), kind)
        label = "real" if kind.startswith("ViT") else None
        save_calibration(Calibration(2.0, 0.5, scorer_digest(folder), label), folder)
        found[kind] = folder
    return found


@pytest.mark.parametrize("kind", [*BUILTIN_DISCRIMINATORS, *KINDS])
def test_an_image_has_the_same_confidence_alone_and_with_others(
    kind: str, folders: dict[str, Path]
) -> None:
    scorer = load_scorer(str(folders.get(kind, kind)), CPU)
    images = rendered_images(len(PROMPTS))
    together = scorer.score(PROMPTS, images)
    alone = [scorer.score([one], [image])[0] for one, image in zip(PROMPTS, images, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    raw = scorer.raw.raw_scores
    # also of images that are right or wrong beyond doubt
    apart = [raw([one], [image])[0] for one, image in zip(PROMPTS, images, strict=True)]
    assert raw(PROMPTS, images) == pytest.approx(apart, rel=1e-4, abs=1e-5)
    assert all(0 < one < 1 for one in together)
    assert len(set(together)) == len(together)


def test_a_clip_score_is_the_cosine_of_its_librarys_embeddings(folders: dict[str, Path]) -> None:
    folder = folders["CLIPModel"]
    images = rendered_images(3)
    scores = load_uncalibrated(str(folder), CPU).raw.raw_scores(PROMPTS[:3], images)
    model, process = (kind.from_pretrained(folder) for kind in (CLIPModel, AutoImageProcessor))
    pictures = [Image.fromarray(np.array(pixels_of(one))) for one in images]
    pixels = process(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        ids = tokenise(build_tokenizer(), PROMPTS[:3])
        found = model(input_ids=ids, attention_mask=(ids != 0).long(), pixel_values=pixels)
    expected = found.logits_per_image.diagonal() / model.logit_scale.exp()
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_classifiers_confidence_is_its_labels_probability(folders: dict[str, Path]) -> None:
    folder = folders["ViTForImageClassification"]
    images = rendered_images(3)
    real, generated = (
        load_uncalibrated(str(folder), CPU, label=label).raw.raw_scores(PROMPTS[:3], images)
        for label in ("real", "generated")
    )
    assert real == pytest.approx([-one for one in generated])


def widen(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["vision_config"]["hidden_size"] = 32
    (folder / "config.json").write_text(json.dumps(content))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pointer": (
        lambda at: (at / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "Git LFS pointer",
    ),
    "cut": (cut, "its header says"),
    "missing": (lambda at: (at / "model.safetensors").unlink(), "no weights (model.safetensors)"),
    "other shapes": (widen, "other shapes than its config.json"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "has no tokenizer"),
    "no processor": (lambda at: (at / "preprocessor_config.json").unlink(), "no usable ImageProc"),
    "of other files": (
        lambda at: save_calibration(Calibration(1.0, 0.0, "0" * 64), at),
        "was made for other files",
    ),
    "uncalibrated": (
        lambda at: (at / "calibration.json").unlink(),
        "ray-cluster models calibrate-cascade CONFIG",
    ),
    "negative": (
        lambda at: (at / "calibration.json").write_text('{"scale": -1, "shift": 0}'),
        "make it anew with",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(how: str, tmp_path: Path) -> None:
    folder = save_scorer(tmp_path / "clip", "CLIPModel")
    save_calibration(Calibration(1.0, 0.0), folder)
    breaks, said = BROKEN[how]
    breaks(folder)
    with pytest.raises(ConfigError) as refused:
        load_scorer(str(folder), CPU)
    message = str(refused.value)
    assert said in message
    assert str(folder) in message
    assert "\n" not in message


def test_what_is_no_discriminator_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="shapes-discriminator, shapes-real-or-generated"):
        load_scorer("shapes-sd", CPU)
    (tmp_path / "config.json").write_text('{"architectures": ["CLIPTextModel"]}')
    with pytest.raises(ModelUnsupported, match="is a CLIPTextModel"):
        load_uncalibrated(str(tmp_path), CPU)
    with pytest.raises(ConfigError, match="give one of generated, real"):
        load_uncalibrated(str(folders["ViTForImageClassification"]), CPU)
