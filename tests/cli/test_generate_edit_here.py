"""``generate --edit`` in this process, with the real engine on a tiny random model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ray_cluster.cli.images.image_files import PreviewFiles
from ray_cluster.imaging.encoder import read_recipe
from tests.cli.conftest import Cli
from tests.cli.pictures import digest, pixels_of, save_mask, save_photo
from tests.engine.random_pipelines import save_klein

ROOT = Path(__file__).parents[2]
EDITED = (slice(16, 40), slice(24, 48))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return save_photo(tmp_path / "photo.png")


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    return save_mask(tmp_path / "mask.png", EDITED)


def test_only_what_is_masked_changes_and_like_repeats_it(
    cli: Cli, tiny_config: Path, photo: Path, mask: Path, tmp_path: Path
) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    inputs = ("--edit", photo, "--mask", mask, "--config", tiny_config)
    made = cli("generate", "a star", *inputs, "--seed", 5, "--feather", 2, "-o", first)
    assert made.exit_code == 0, made.output
    assert "  64x64  " in made.stdout
    before, after = pixels_of(photo), pixels_of(first)
    assert not np.array_equal(before[EDITED], after[EDITED])
    after[EDITED] = before[EDITED]
    assert np.array_equal(before, after)
    recipe = read_recipe(first.read_bytes())
    assert (recipe["image_sha256"], recipe["mask_sha256"]) == (digest(photo), digest(mask))
    assert (recipe["strength"], recipe["feather_px"], recipe["paste_back"]) == ("1.0", "2", "true")
    repeated = cli("generate", "--like", first, *inputs, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("template_px", "canvas_px"),
    # filled up to the grid, and scaled down to the longest side that the model makes
    [((70, 65), (70, 65)), pytest.param((200, 137), (96, 66), marks=pytest.mark.slow)],
)
def test_like_repeats_an_edit_whose_size_is_off_the_grid(
    cli: Cli,
    tiny_config: Path,
    tmp_path: Path,
    template_px: tuple[int, int],
    canvas_px: tuple[int, int],
) -> None:
    photo = save_photo(tmp_path / "photo.png", template_px)
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    inputs = ("--edit", photo, "--config", tiny_config)
    made = cli("generate", "a star", *inputs, "--strength", 0.4, "-o", first)
    assert made.exit_code == 0, made.output
    assert "  {}x{}  ".format(*canvas_px) in made.stdout
    assert pixels_of(first).shape == (canvas_px[1], canvas_px[0], 3)
    recipe = read_recipe(first.read_bytes())
    assert (recipe["num_inference_steps"], recipe["strength"]) == ("3", "0.4")
    repeated = cli("generate", "--like", first, *inputs, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert first.read_bytes() == again.read_bytes()
    stronger = cli("generate", "--like", first, *inputs, "--strength", 1, "--force", "-o", again)
    assert stronger.exit_code == 0, stronger.output
    assert not np.array_equal(pixels_of(first), pixels_of(again))


def test_a_crop_keeps_a_large_image_at_its_size_and_like_repeats_it(
    cli: Cli, tiny_config: Path, tmp_path: Path
) -> None:
    photo = save_photo(tmp_path / "photo.png", (301, 203))
    mask = save_mask(tmp_path / "mask.png", EDITED, (301, 203))
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    inputs = ("--edit", photo, "--mask", mask, "--config", tiny_config)
    made = cli("generate", "a star", *inputs, "--crop", "auto", "-o", first)
    assert made.exit_code == 0, made.output
    before, after = pixels_of(photo), pixels_of(first)
    assert not np.array_equal(before[EDITED], after[EDITED])
    after[EDITED] = before[EDITED]
    assert np.array_equal(before, after)
    repeated = cli("generate", "--like", first, *inputs, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert first.read_bytes() == again.read_bytes()


def test_a_mask_of_everything_is_text_to_image(
    cli: Cli, tiny_config: Path, photo: Path, tmp_path: Path
) -> None:
    everything = save_mask(tmp_path / "mask.png", (slice(None), slice(None)))
    plain, edited = tmp_path / "plain.png", tmp_path / "edited.png"
    common = ("generate", "a star", "--seed", 5, "--config", tiny_config)
    assert cli(*common, "-o", plain).exit_code == 0
    made = cli(*common, "--edit", photo, "--mask", everything, "-o", edited)
    assert made.exit_code == 0, made.output
    assert plain.read_bytes() == edited.read_bytes()


def test_images_of_one_edit_have_their_own_seeds(
    cli: Cli, tiny_config: Path, photo: Path, mask: Path, tmp_path: Path
) -> None:
    arguments = ("--edit", photo, "--mask", mask, "--seed", 5, "--n", 2, "-o", tmp_path / "a.png")
    made = cli("generate", "a star", *arguments, "--config", tiny_config)
    assert made.exit_code == 0, made.output
    first, second = (pixels_of(tmp_path / f"a-{number}.png") for number in (1, 2))
    assert not np.array_equal(first, second)
    first[EDITED] = second[EDITED]
    assert np.array_equal(first, second)


def test_previews_show_the_image_that_is_returned(
    cli: Cli,
    tiny_config: Path,
    photo: Path,
    mask: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    write = PreviewFiles.write

    def note(self: PreviewFiles, image: int, step: int, data: bytes) -> Path:
        written.append(data)
        return write(self, image, step, data)

    monkeypatch.setattr(PreviewFiles, "write", note)
    # so many steps that the preview is there before the image
    more = ("--previews", 1, "--steps", 100)
    arguments = ("--edit", photo, "--mask", mask, *more, "-o", tmp_path / "a.png")
    made = cli("generate", "a star", *arguments, "--config", tiny_config)
    assert made.exit_code == 0, made.output
    (data,) = written
    before, shown = pixels_of(photo), np.array(Image.open(io.BytesIO(data)))
    shown[EDITED] = before[EDITED]
    assert np.array_equal(before, shown)


WRONG = {
    "damaged": (["--edit", "cut.png"], "'image' cannot be decoded"),
    "no image": (["--edit", "tiny.yaml"], "'image' cannot be decoded"),
    "mask without alpha": (["--edit", "photo.png", "--mask", "photo.png"], "no alpha channel"),
    "nothing to edit": (["--edit", "photo.png", "--mask", "kept.png"], "leaves nothing to edit"),
    "mask of another size": (
        ["--edit", "photo.png", "--mask", "small.png"],
        "'mask' has 32x32 pixels, and 'image' 64x64",
    ),
    "strength": (["--edit", "photo.png", "--strength", "1.5"], "'strength' must be"),
    "steps": (["--edit", "photo.png", "--steps", "999"], "(option --steps)"),
}


@pytest.mark.slow
def test_a_model_looks_at_several_images_and_like_repeats_it(
    cli: Cli, photo: Path, mask: Path, tmp_path: Path
) -> None:
    folder, config = save_klein(tmp_path / "model"), tmp_path / "config.yaml"
    pool = {"name": "k", "model": str(folder), "max_px": 64}
    pool |= {"defaults": {"size": "64x64", "num_inference_steps": 2}}
    config.write_text(json.dumps({"pools": [pool], "cascades": [], "discriminators": []}))
    first, again, other = (tmp_path / f"{name}.png" for name in ("first", "again", "other"))
    inputs = ("--edit", photo, "--edit", mask, "--config", config)
    made = cli("generate", "a star", *inputs, "--seed", 5, "-o", first)
    assert made.exit_code == 0, made.output
    recipe = read_recipe(first.read_bytes())
    assert json.loads(recipe["references_sha256"]) == [digest(photo), digest(mask)]
    repeated = cli("generate", "--like", first, *inputs, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert first.read_bytes() == again.read_bytes()
    swapped = ("--edit", mask, "--edit", photo, "--config", config)
    assert cli("generate", "a star", *swapped, "--seed", 5, "-o", other).exit_code == 0
    assert not np.array_equal(pixels_of(first), pixels_of(other))
    refused = cli("generate", "a", *inputs, "--strength", 0.5, "-o", other, "-f")
    assert refused.exit_code == 1
    assert "looks at whole images" in " ".join(refused.output.split())


def test_a_wrong_image_is_one_sentence_before_anything_heavy_is_imported(
    tiny_config: Path, photo: Path, tmp_path: Path
) -> None:
    half = photo.stat().st_size // 2
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:half])
    save_mask(tmp_path / "kept.png", (slice(0), slice(0)))
    save_mask(tmp_path / "small.png", (slice(8), slice(8)), (32, 32))
    script = """
import json, sys
from typer.testing import CliRunner
from ray_cluster.cli.app import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, ["generate", "x", *arguments, "--config", "tiny.yaml"])
    heavy = [name for name in ("torch", "diffusers", "transformers", "ray") if name in sys.modules]
    print(json.dumps([result.exit_code, result.stderr, heavy]))
"""
    answer = subprocess.run(
        [sys.executable, "-c", script, json.dumps([arguments for arguments, _ in WRONG.values()])],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    answers = [json.loads(line) for line in answer.stdout.splitlines()]
    for (code, message, heavy), (_, sentence) in zip(answers, WRONG.values(), strict=True):
        assert (code, heavy) == (1, []), message
        assert sentence in message
        assert message.startswith("error: ")
        assert len(message.splitlines()) == 1
