"""Curves of a cascade are what their file says; files that are wrong say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import ConfigError
from ray_cluster.models.cascade_curves import CascadeCurves, load_curves, save_curves
from ray_cluster.models.local import check_models
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

CURVES: dict[str, Any] = {
    "source": "made up for a test",
    "deferral": {"thresholds": [0, 1e-5, 0.5, 1], "rates": [0, 0.1, 0.8, 1]},
    "quality": {
        "name": "CLIP score",
        "lower_is_better": False,
        "deferral_rates": [0, 0.5, 1],
        "scores": [0.25, 0.31, 0.3],
    },
}


@pytest.mark.parametrize(
    ("name", "light", "best"), [("diffserve-1", 22.77, 0.6), ("diffserve-2", 24.86, 0.7)]
)
def test_published_curves_come_with_the_package(name: str, light: float, best: float) -> None:
    curves = load_curves(name)
    assert (curves.quality_name, curves.quality.lower_is_better) == ("FID", True)
    assert (curves.quality.score_at(0), curves.quality.best_rate) == (light, best)
    # both have the same heavy model
    assert curves.quality.score_at(1) == 18.55
    assert "DiffServe, cascade" in curves.source


def test_curves_are_read_from_json_yaml_or_a_folder(tmp_path: Path) -> None:
    for name in ("mine.json", "mine.yml", "deferral.json"):
        (tmp_path / name).write_text(json.dumps(CURVES))
    found = [load_curves("mine.json", tmp_path), load_curves(tmp_path / "mine.yml")]
    found.append(load_curves(tmp_path))
    assert found[0] == found[1] == found[2]
    deferral, quality = CURVES["deferral"], CURVES["quality"]
    assert found[0].deferral == DeferralCurve(
        tuple(deferral["thresholds"]), tuple(deferral["rates"])
    )
    assert found[0].quality == QualityCurve(
        tuple(quality["deferral_rates"]), tuple(quality["scores"]), lower_is_better=False
    )
    assert (found[0].quality_name, found[0].source) == ("CLIP score", "made up for a test")


def test_written_curves_come_back_and_may_lack_a_name_and_a_source(tmp_path: Path) -> None:
    quality = QualityCurve((0.0, 1.0), (0.5, 0.9), lower_is_better=False)
    deferral = DeferralCurve((0.0, 1e-7, 1.0), (0.0, 0.3, 1.0))
    for curves in (
        CascadeCurves(deferral, quality),
        CascadeCurves(deferral, quality, "share right", "a test"),
    ):
        save_curves(curves, tmp_path / "deferral.json", {"prompts": {"easy": 3}})
        assert load_curves(tmp_path) == curves


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (None, {"speed": 3}, "speed: there is no such key"),
        (None, {"source": None}, "source: "),
        ("deferral", {"rates": [0, 0.9, 0.8, 1]}, r"deferral: .*rises from \(0, 0\) to \(1, 1\)"),
        ("deferral", {"thresholds": [0, 1]}, "deferral: .*as many values as thresholds"),
        ("quality", {"deferral_rates": [0.1, 0.5, 1]}, "quality: .*at a deferral rate of 0"),
        ("quality", {"scores": [1, 2, float("nan")]}, "quality: .*finite"),
        ("quality", {"lower_is_better": "maybe"}, "quality.lower_is_better: "),
        ("quality", {"name": "質"}, "quality.name: "),
    ],
)
def test_what_is_wrong_with_curves_is_said(
    tmp_path: Path, section: str | None, changes: dict[str, Any], message: str
) -> None:
    content = CURVES | changes if section is None else CURVES | {section: CURVES[section] | changes}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"the curves .*mine.json: {message}") as raised:
        load_curves(path)
    assert "\n" not in str(raised.value)


def test_curves_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there are no curves 'mine'.*deferral.json.*diffserve-1"
    ):
        load_curves("mine", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read the curves .*none\.yaml"):
        load_curves("none.yaml", tmp_path)


def test_a_configuration_with_curves_that_are_not_there_is_refused(tmp_path: Path) -> None:
    pools = [{"name": name, "model": "shapes-sd"} for name in ("light", "heavy")]
    cascade = {"name": "auto", "light": "light", "heavy": "heavy", "discriminator": "judge"}
    config = ClusterConfig.model_validate(
        {
            "pools": pools,
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [cascade | {"threshold": 0.5, "curves": str(tmp_path / "none.json")}],
        }
    )
    with pytest.raises(ConfigError, match=r"cascade auto: curves: cannot read .*none\.json"):
        check_models(config)
