"""``controlnets list`` and ``generate --control`` against the real HTTP application."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_cluster.cli.images.controlnet_options import controlnets_of_recipe, parse_controlnets
from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, OutputSpec
from tests.cli.conftest import Cli
from tests.cli.pictures import digest, save_photo
from tests.cli.served import Served
from tests.fakes import image_request


def here(served: Served, *more: object) -> tuple[object, ...]:
    return ("--url", served.url, "--api-key", "secret", *more)


@pytest.fixture
def sketch(tmp_path: Path) -> Path:
    return save_photo(tmp_path / "sketch.png")


def used(served: Served) -> list[tuple[Any, ...]]:
    return [
        (one.name, one.preprocess, one.scale, one.start, one.end)
        for one in served.made[-1].add_ons.controls
    ]


def test_controlnets_are_listed(cli: Cli, served: Served) -> None:
    listed = cli("controlnets", "list", *here(served))
    assert listed.exit_code == 0, listed.output
    assert listed.stdout.splitlines() == [
        "edges  service  for shapes: lines, white on black",
        "detectors: none, canny, invert, scribble",
    ]
    as_json = json.loads(cli("controlnets", "list", "--json", *here(served)).stdout)
    assert [one["name"] for one in as_json["data"]] == ["edges"]
    wrong = cli("controlnets", "list", "--url", served.url, "--api-key", "wrong")
    assert wrong.exit_code == 1
    assert wrong.stderr.startswith("error: The API key is not valid")


def test_controls_reach_the_service_and_the_job_shows_them(
    cli: Cli, served: Served, sketch: Path, tmp_path: Path
) -> None:
    options = ("--control", f"edges={sketch}", "--control", f"edges+canny={sketch}:0.8:0.1-0.6")
    result = cli("generate", "x", *options, *here(served), "-o", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert used(served) == [("edges", "none", 1, 0, 1), ("edges", "canny", 0.8, 0.1, 0.6)]
    assert {one.sent_sha256 for one in served.made[0].add_ons.controls} == {digest(sketch)}
    [job] = served.jobs()
    shown = cli("jobs", "show", job["id"], *here(served)).stdout
    assert "edges+none:1:0-1, edges+canny:0.8:0.1-0.6" in shown
    # beside an edit
    edit = ("--edit", sketch, "--control", f"edges={sketch}:0.5", "-o", tmp_path / "b.png")
    assert cli("generate", "x", *edit, *here(served)).exit_code == 0
    assert served.made[-1].edit is not None
    assert used(served) == [("edges", "none", 0.5, 0, 1)]


WRONG = {
    "no file": ("edges", "write NAME=FILE, such as edges=sketch.png"),
    "no name": ("=a.png", "write NAME=FILE"),
    "empty": ("edges=", "write NAME=FILE"),
    "away": ("edges=nothing.png", "--control edges=nothing.png: there is no such file"),
    "folder": ("edges=.", "--control edges=. is a folder"),
    "no image": ("edges=text.png", "PNG, JPEG, WebP"),
    "unknown": ("egdes=sketch.png", "Did you mean 'edges'?"),
    "detector": ("edges+cany=sketch.png", "Did you mean 'canny'?"),
    "scale": ("edges=sketch.png:5", "'controlnets[0].scale' must be at most 2"),
    "range": ("edges=sketch.png:1:0.6-0.5", "from 0.6 to 0.5"),
}


@pytest.mark.parametrize("case", WRONG, ids=list(WRONG))
def test_a_wrong_control_is_one_sentence(
    cli: Cli,
    served: Served,
    sketch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("some longer text")
    text, said = WRONG[case]
    result = cli("generate", "x", "--control", text, *here(served), "-o", "a.png")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert served.jobs() == []


def like_of(folder: Path, sketch: Path) -> Path:
    use = ControlNetUse("edges", BlobRef("ab" * 32, 5), 0.7, 0.0, 0.5, "canny", digest(sketch))
    request = image_request(model="shapes", seed=5, num_steps=4, add_ons=AddOns((use,)))
    path = folder / "like.png"
    pixels = np.zeros((64, 64, 3), np.uint8)
    path.write_bytes(encode_image(pixels, OutputSpec(), request.recipe()))
    return path


def test_like_needs_the_images_again_and_checks_them(
    cli: Cli, served: Served, sketch: Path, tmp_path: Path
) -> None:
    like = ("generate", "--like", like_of(tmp_path, sketch), *here(served), "--force")
    out = ("-o", tmp_path / "a.png")
    assert cli(*like, "--control", f"edges={sketch}", *out).exit_code == 0
    assert used(served) == [("edges", "canny", 0.7, 0, 0.5)]
    assert cli(*like, "--control", f"edges={sketch}:0.2", *out).exit_code == 0
    assert used(served) == [("edges", "canny", 0.2, 0, 0.5)]
    other = save_photo(tmp_path / "other.png", (48, 48))
    num_jobs = len(served.jobs())
    for options, said in (
        ((), f"give --control edges=FILE with the file whose SHA-256 digest is {digest(sketch)}"),
        (("--control", f"x={sketch}"), "give --control edges=FILE"),
        (("--control", f"edges={sketch}") * 2, "give --control edges=FILE"),
        (("--control", f"edges={other}"), f"{digest(other)}, and the recipe's is"),
    ):
        result = cli(*like, *options, *out)
        assert result.exit_code == 1
        assert said in result.stderr
    assert len(served.jobs()) == num_jobs


def test_what_options_and_recipes_mean() -> None:
    texts = ["edges=a.png", "a.b-c+canny=x=y:z.png:1", "e=:.5:0-1e-1", "e=a:1:2", "e=a:-1:0.2-0.4"]
    assert [(str(path), values) for path, values in parse_controlnets(texts)] == [
        ("a.png", {"name": "edges"}),
        ("x=y:z.png", {"name": "a.b-c", "preprocess": "canny", "scale": 1.0}),
        (":.5:0-1e-1", {"name": "e"}),
        ("a:1", {"name": "e", "scale": 2.0}),
        ("a", {"name": "e", "scale": -1.0, "start": 0.2, "end": 0.4}),
    ]
    for text in ("edges", "=a", "+canny=a", "edges+=a", ""):
        with pytest.raises(InvalidRequest):
            parse_controlnets([text])
    for text in ("a", "{}", "[1]", "", '[{"name": "a"}]'):
        with pytest.raises(ValueError, match=r"list of ControlNets|Expecting value"):
            controlnets_of_recipe(text)
