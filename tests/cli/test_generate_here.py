"""``generate`` without ``--url`` has ControlNets and cascades, as a service has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from ray_cluster.imaging.encoder import read_recipe
from tests.cli.conftest import Cli
from tests.e2e.controlled import GUIDANCE, NUM_STEPS, hinted, truth
from tests.e2e.edit_templates import pixels_of, png
from tests.e2e.service import CASCADE, LIGHT_POOL


def test_a_builtin_controlnet_is_followed_as_diffusers_does(cli: Cli, tmp_path: Path) -> None:
    texts, maps = hinted(4)
    sketch, out, again = (tmp_path / name for name in ("map.png", "out.png", "again.png"))
    sketch.write_bytes(png(maps["edges"][2]))
    control = ("--control", f"shapes-sd-edges={sketch}")
    options = ("--seed", 7, "--size", "64x64", "--steps", NUM_STEPS, "--guidance", GUIDANCE)
    made = cli("generate", texts[2], *control, *options, "-o", out)
    assert made.exit_code == 0, made.output
    expected = truth(texts[2], 7, {"edges": maps["edges"][2]})
    assert np.abs(pixels_of(out.read_bytes()).astype(int) - expected).max() <= 1
    repeated = cli("generate", "--like", out, *control, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert out.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_cascade_chooses_between_its_models(cli: Cli, tmp_path: Path, threshold: float) -> None:
    heavy = {"name": "shapes-sd", "model": "shapes-sd", "num_cpus": 0.5}
    cascades = [one | {"threshold": threshold} for one in CASCADE["cascades"]]
    path, out = tmp_path / "cascade.yaml", tmp_path / "out.png"
    path.write_text(yaml.safe_dump({"pools": [heavy, LIGHT_POOL], **CASCADE, "cascades": cascades}))
    model = ("--config", path, "--model", "shapes-auto")
    made = cli("generate", "a red circle", *model, "--size", "64x64", "--seed", 1, "-o", out)
    assert made.exit_code == 0, made.output
    recipe = read_recipe(out.read_bytes())
    assert recipe["cascade"] == "shapes-auto"
    assert recipe["model"] == ("shapes-sd" if threshold else "shapes-sd-light")


def test_an_unknown_controlnet_is_named_before_anything_is_loaded(cli: Cli, tmp_path: Path) -> None:
    sketch = tmp_path / "map.png"
    sketch.write_bytes(png(np.zeros((64, 64, 3), np.uint8)))
    made = cli("generate", "a star", "--control", f"edgse={sketch}", "-o", tmp_path / "out.png")
    assert made.exit_code == 1
    assert "names 'edgse'" in made.output
    assert "shapes-sd-edges" in made.output
