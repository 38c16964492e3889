"""Discriminators learn from right labels, are exported whole, calibrated and measured."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.imaging.small_images import small_image
from ray_cluster.models.builtin import builtin_folder, weights_folder
from ray_cluster.models.discriminators import load_discriminator
from ray_cluster.quality.captions import write_caption
from ray_cluster.quality.cascade_fit import area_under_curve
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.quality.render import Jitter, render
from ray_cluster.quality.scenes import Scene, SceneObject, sample_several, sample_single
from ray_cluster.quality.suite import suite_prompts
from recipes.batches import Captioned
from recipes.discriminators.figures import Trial, figures_of
from recipes.discriminators.pictures import Example, make_examples, to_bytes
from recipes.discriminators.prompts import change_detail, part_targets, show
from recipes.export import export
from recipes.publish import measure
from recipes.recipe import Recipe
from recipes.runs import TrainingRun
from recipes.stages import MODEL_STAGES, train
from tests.recipes.tiny import TINY_STEPS, tiny_run

CPU = torch.device("cpu")
JUDGE = "shapes-discriminator"


def renders_with_prompts(count: int) -> tuple[list[str], torch.Tensor, np.ndarray]:
    """Renders, each with its prompt and with one in which a detail is another."""
    rng = random.Random(11)
    scenes = [sample_single(rng) if index % 2 else sample_several(rng) for index in range(count)]
    pixels = render(scenes, width=64, height=64, jitter=Jitter(), seed=4)
    changed = [change_detail(scene, rng) for scene in scenes]
    prompts = [write_caption(scene) for scene in (*scenes, *changed)]
    is_right = np.array([text == prompts[index % count] for index, text in enumerate(prompts)])
    return prompts, pixels.repeat(2, 1, 1, 1), is_right


def test_the_committed_weights_tell_prompts_that_are_wrong_in_one_detail() -> None:
    torch.set_num_threads(1)
    prompts, pixels, is_right = renders_with_prompts(150)
    scores = load_discriminator(weights_folder() / JUDGE, CPU).scores(prompts, pixels)
    assert area_under_curve(scores.double().numpy(), is_right) > 0.9
    scorer = load_scorer(JUDGE, CPU)
    images = [small_image(one) for one in to_bytes(pixels).permute(0, 2, 3, 1).numpy()]
    confidences = np.array(scorer.score(prompts, images))
    assert confidences[is_right].mean() > 0.8
    assert confidences[~is_right].mean() < 0.4


def test_the_committed_figures_show_that_it_is_worth_it() -> None:
    ours, image_only = (
        json.loads((weights_folder() / name / "evaluation.json").read_text())
        for name in (JUDGE, "shapes-real-or-generated")
    )
    assert ours["images"] >= 300
    assert ours["area"]["all"] > max(0.9, image_only["area"]["all"])
    for one in ours["deferrals"]:
        assert one["quality"] >= one["random"]
        assert one["measured"] == pytest.approx(one["calibrated"], abs=0.03)


def test_labels_are_those_of_the_classifier() -> None:
    thing = SceneObject("star", "red", "large", "left")
    other = SceneObject("ring", "blue", "small", "right")
    scene = Scene((thing, other), "black")
    pixels = to_bytes(render([scene], width=64, height=64))
    [reading] = read_pictures(load_classifier(), pixels.float() / 255)
    example = Example(pixels[0], Captioned(scene, scene, write_caption(scene)), reading, "render")
    rng, recipe = random.Random(2), Recipe().discriminator
    for shown in show([example] * 200, rng, recipe):
        is_same = shown.stated == scene or all(
            getattr(stated, name) in {None, getattr(seen, name)}
            for stated, seen in zip(shown.stated.objects, scene.objects, strict=False)
            for name in ("shape", "colour", "size", "position")
        )
        agrees = is_same and shown.stated.background in {None, "black"}
        assert shown.is_right == agrees, shown.caption
        right, counts = part_targets([shown])
        assert counts.all()
        # a picture is right where all its parts are
        assert bool(right.all()) == shown.is_right


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run whose pictures are made once."""
    return tiny_run(tmp_path_factory.mktemp("discriminators"), base=builtin_folder("shapes-sd"))


@pytest.mark.parametrize(
    "name", [pytest.param(JUDGE, marks=pytest.mark.slow), "shapes-real-or-generated"]
)
def test_a_discriminator_is_exported_calibrated_and_measured(
    name: str, run: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(run, MODEL_STAGES[name])
    # a net of six steps may well be wrong more often than right
    monkeypatch.setattr("recipes.discriminators.figures.fit_logistic", lambda *_: (1.0, 0.0))
    folder = export(name, run, tmp_path / name)
    assert run.folder.index(MODEL_STAGES[name][0].name) == TINY_STEPS.steps
    scores = load_discriminator(folder, CPU).scores(["a star"], torch.zeros(1, 3, 64, 64))
    assert scores.shape == (1,)
    changes, report = {"prompts": 2}, tmp_path / "report"
    figures = measure(name, folder, changes=changes, report=report, kept=run.folder.path)
    told = json.loads((report / "evaluation.json").read_text())
    assert told["images"] == 2
    assert len(told["deferrals"]) == 11
    assert "calibration error" in figures.tables()
    # another training finds the pictures
    made = {path: path.stat().st_mtime_ns for path in run.folder.path.rglob("*.safetensors")}
    assert len(make_examples(run)[64, 64]) == 12
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_figures_are_those_of_the_images_counted_by_hand() -> None:
    prompts = tuple(one for kind in ("easy", "hard") for one in suite_prompts(kind, 2))
    light = np.array([True, True, True, False])
    trial = Trial(prompts, torch.zeros(4, 3, 64, 64), light, np.ones(4, bool), np.ones(4, bool))
    confidences = np.array([0.9, 0.6, 0.7, 0.2])
    figures = figures_of(trial, confidences, lambda rate: rate)
    at = {one.calibrated: one for one in figures.deferrals}
    assert figures.area["all"] == 1
    assert (at[0.0].measured, at[0.0].quality) == (0, 0.75)
    assert (at[0.3].measured, at[0.3].quality, at[0.3].random) == (0.25, 1, 0.8125)
    assert at[0.7].measured == 0.5
