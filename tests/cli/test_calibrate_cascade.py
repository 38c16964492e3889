"""``models calibrate-cascade`` makes a discriminator one that a cascade can be served with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ray_cluster.cli.models.cascade_run import common_size, fit_cascade, make_images
from ray_cluster.config.loading import load_config
from ray_cluster.engine.models.loading import load_model
from ray_cluster.engine.scorers.loading import UncalibratedScorer, load_scorer
from ray_cluster.errors import ConfigError
from ray_cluster.imaging.small_images import pixels_of, small_image
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.requests import SmallImage
from tests.cli.conftest import Cli
from tests.engine.scorers import save_scorer


class Brightness:
    """Scores an image by its first pixel."""

    def raw_scores(self, prompts: list[str], images: list[SmallImage]) -> list[float]:
        return [float(pixels_of(image)[0, 0, 0]) for image in images]


def of_brightness(values: list[int]) -> np.ndarray:
    return np.array([np.full((8, 8, 3), value, np.uint8) for value in values])


@pytest.fixture
def cascade_config(tiny_config: Path, tmp_path: Path) -> Path:
    """A cascade of two pools of one tiny model, with a CLIP model as its discriminator."""
    content = yaml.safe_load(tiny_config.read_text())
    light = {**content["pools"][0], "name": "light"}
    light["defaults"] = {**light["defaults"], "num_inference_steps": 1}
    judge = {"name": "judge", "model": str(save_scorer(tmp_path / "clip", "CLIPModel"))}
    judge["calibration"] = str(tmp_path / "calibrated")
    cascade = {"name": "auto", "light": "light", "heavy": "tiny", "discriminator": "judge"}
    content["pools"].append(light)
    content |= {"discriminators": [judge], "cascades": [{**cascade, "threshold": 0.5}]}
    tiny_config.write_text(yaml.safe_dump(content))
    return tiny_config


def test_the_config_it_calibrates_can_be_served(
    cli: Cli, cascade_config: Path, tmp_path: Path
) -> None:
    judge = load_config(cascade_config).discriminators[0]
    command = ("models", "calibrate-cascade", cascade_config, "--images", 18)
    with pytest.raises(ConfigError, match="is not calibrated"):
        load_scorer(judge.model, torch.device("cpu"), calibration=judge.calibration)
    result = cli(*command)
    assert result.exit_code == 0, result.output
    scorer = load_scorer(judge.model, torch.device("cpu"), calibration=judge.calibration)
    image = small_image(np.full((64, 64, 3), 100, np.uint8))
    assert 0 < scorer.score(["a red circle"], [image])[0] < 1
    curves = load_curves(str(judge.calibration))
    # all light images, and all heavy ones
    assert curves.quality.scores[0] != curves.quality.scores[-1]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("calibrated/images/*.npz")}
    assert len(files) == 6
    assert cli(*command).exit_code == 0
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert "made with other settings" in cli(*command[:-1], 20).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cascade", "none"), "--cascade 'none'; the configuration has auto"),
        (("--images", 2), "--images 2: give at least 10"),
        (("--prompts", "/nowhere"), "--prompts /nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused_before_images_are_made(
    cli: Cli, cascade_config: Path, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    result = cli("models", "calibrate-cascade", cascade_config, *options)
    assert result.exit_code != 0
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "calibrated").exists()


def test_each_model_makes_its_images_with_its_own_defaults(cascade_config: Path) -> None:
    pools = {pool.name: pool for pool in load_config(cascade_config).pools}
    light, heavy = load_model(pools["light"]), load_model(pools["tiny"])
    size = common_size(light.profile, heavy.profile)
    assert size == (64, 64)
    first, second = (make_images(one, ["a star"], size) for one in (light, heavy))
    assert first.shape == second.shape == (1, 64, 64, 3)
    assert (first != second).any()
    assert (make_images(light, ["a star"], size) == first).all()


def test_a_confidence_is_the_chance_that_the_light_image_is_as_good() -> None:
    rng = np.random.default_rng(3)
    light = rng.integers(1, 255, 4000)
    # the brighter the light image, the more often it is brighter than the heavy one
    is_as_good = rng.random(4000) < light / 255
    heavy = np.where(is_as_good, light - 1, light + 1)
    scorer = UncalibratedScorer(Brightness(), "digest")
    images = of_brightness(light.tolist()), of_brightness(heavy.tolist())
    fit = fit_cascade(scorer, [""] * 4000, *images)
    for value in (40, 128, 215):
        near = np.abs(light - value) < 12
        share = float(is_as_good[near].mean())
        assert fit.calibration.confidence(value) == pytest.approx(share, abs=0.06)
    assert fit.calibration.scorer_sha256 == "digest"
    # images that the heavy model makes better are made anew first
    scores = fit.curves.quality.scores
    assert max(scores) > max(scores[0], scores[-1])
    misled = of_brightness(np.where(is_as_good, light + 1, light - 1).tolist())
    with pytest.raises(ConfigError, match="not right more often"):
        fit_cascade(scorer, [""] * 4000, images[0], misled)


def test_scores_that_say_nothing_are_refused() -> None:
    scorer = UncalibratedScorer(Brightness(), "digest")
    light, heavy = of_brightness([3] * 10), of_brightness([2] * 10)
    with pytest.raises(ConfigError, match="10 of 10 images are right"):
        fit_cascade(scorer, [""] * 10, light, heavy)
