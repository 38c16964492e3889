"""``generate --edit``: what is sent, what a recipe asks for, and what is refused at once."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_cluster.cli.images.image_files import GeneratedFile, GeneratedImages
from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.requests import BlobRef, Edit, OutputSpec, Reference
from tests.cli.conftest import Cli
from tests.cli.pictures import digest, save_mask, save_photo
from tests.cli.served import Served
from tests.fakes import image_request

HERE = ("--url", "http://127.0.0.1:1")


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies of the jobs that a service is sent; it makes two bytes of each."""
    sent: list[dict[str, Any]] = []

    def generate(_service: object, body: Mapping[str, Any], *_: object) -> GeneratedImages:
        sent.append(dict(body))
        made = GeneratedFile(b"ok", 7, {})
        return GeneratedImages("shapes-sd", "64x64", (made,), 1.0, None)

    monkeypatch.setattr("ray_cluster.cli.remote.remote_jobs.generate_there", generate)
    return sent


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return save_photo(tmp_path / "photo.png")


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    return save_mask(tmp_path / "mask.png", (slice(16, 48), slice(16, 48)))


def like_of(folder: Path, photo: Path, mask: Path | None, **more: Any) -> Path:
    """Write the png of an edit, with its recipe."""
    refs = [None if path is None else BlobRef(digest(path), 1) for path in (photo, mask)]
    image, of_mask = refs
    assert image is not None
    edit = Edit(image, (64, 64), schedule_steps=20, mask=of_mask, **more)
    request = image_request(model="shapes-sd", prompt="a star", num_steps=16, seed=5, edit=edit)
    path = folder / "like.png"
    pixels = np.zeros((64, 64, 3), np.uint8)
    path.write_bytes(encode_image(pixels, OutputSpec(), request.recipe()))
    return path


def test_every_option_of_an_edit_reaches_the_service(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    result = cli(
        *("generate", "a red star", "--edit", photo, "--mask", mask, "--strength", 0.7),
        *("--feather", 3, "--crop", "auto", "--paste-back", "--seed", 7, "--steps", 20, *HERE),
        *("-o", tmp_path / "edited.png"),
    )
    assert result.exit_code == 0, result.output
    (body,) = bodies
    assert base64.b64decode(body.pop("image"), validate=True) == photo.read_bytes()
    assert base64.b64decode(body.pop("mask"), validate=True) == mask.read_bytes()
    edit = {"strength": 0.7, "feather_px": 3, "crop": "auto", "paste_back": True}
    more = {"prompt": "a red star", "seed": 7, "num_inference_steps": 20, "output_format": "png"}
    assert body == edit | more
    assert (tmp_path / "edited.png").read_bytes() == b"ok"


def test_several_images_are_sent_in_their_order(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "edited.png", "-f")
    result = cli("generate", "a", "--edit", photo, "--edit", mask, *HERE, *out)
    assert result.exit_code == 0, result.output
    sent = [base64.b64decode(one) for one in bodies[0]["images"]]
    assert sent == [photo.read_bytes(), mask.read_bytes()]
    looked_at = [Reference(BlobRef(digest(one), 1), 64, 64) for one in (photo, mask)]
    request = image_request(model="m", prompt="a", references=tuple(looked_at))
    like = tmp_path / "like.png"
    blank = np.zeros((64, 64, 3), np.uint8)
    like.write_bytes(encode_image(blank, OutputSpec(), request.recipe()))
    again = ("generate", "--like", like, *HERE, *out)
    assert cli(*again, "--edit", photo, "--edit", mask).exit_code == 0
    assert bodies[1]["images"] == bodies[0]["images"]
    for given, says in {
        (photo,): f"the file whose SHA-256 digest is {digest(mask)}",
        (mask, photo): "is not the file",
        (photo, mask, mask): "is one more than the images",
    }.items():
        edits = [part for one in given for part in ("--edit", one)]
        result = cli(*again, *edits)
        assert (result.exit_code, says in " ".join(result.output.split())) == (1, True), result


def test_what_is_not_given_is_not_sent(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, tmp_path: Path
) -> None:
    arguments = ("--edit", photo, "--no-paste-back", *HERE, "-o", tmp_path / "edited.png")
    assert cli("generate", "a star", *arguments).exit_code == 0
    assert set(bodies[0]) == {"prompt", "image", "paste_back", "output_format"}
    assert bodies[0]["paste_back"] is False


@pytest.mark.parametrize(
    ("param", "option"), [("image", "--edit"), ("feather_px", "--feather"), ("size", None)]
)
def test_what_the_service_refuses_is_named_with_its_option(
    cli: Cli,
    photo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    param: str,
    option: str | None,
) -> None:
    def refuse(*_: object) -> GeneratedImages:
        raise InvalidRequest(f"{param!r} is wrong.", param)

    monkeypatch.setattr("ray_cluster.cli.remote.remote_jobs.generate_there", refuse)
    result = cli("generate", "a star", "--edit", photo, *HERE, "-o", tmp_path / "a.png")
    hint = "" if option is None else f" (option {option})"
    assert (result.exit_code, result.stderr) == (1, f"error: {param!r} is wrong.{hint}\n")


def test_like_repeats_an_edit_with_its_images(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    like = like_of(tmp_path, photo, mask, strength=0.8, feather_px=2, paste_back=False)
    arguments = ("--like", like, "--edit", photo, "--mask", mask, *HERE, "-o", tmp_path / "a.png")
    result = cli("generate", *arguments)
    assert result.exit_code == 0, result.output
    result = cli("generate", *arguments, "--force", "--strength", 0.5, "--paste-back")
    assert result.exit_code == 0, result.output
    repeated, changed = bodies
    assert base64.b64decode(repeated["mask"]) == mask.read_bytes()
    assert (repeated["strength"], repeated["feather_px"], repeated["paste_back"]) == (0.8, 2, False)
    assert (repeated["num_inference_steps"], repeated["seed"]) == (20, 5)
    assert not {"image_sha256", "mask_sha256"} & repeated.keys()
    assert changed == {**repeated, "strength": 0.5, "paste_back": True}


def test_like_asks_for_the_images_of_an_edit(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    like = like_of(tmp_path, photo, mask)
    arguments = ("generate", "--like", like, *HERE, "-o", tmp_path / "a.png")
    neither = cli(*arguments, "--strength", 0.5)
    assert neither.exit_code == 1
    assert f"with --edit the file whose SHA-256 digest is {digest(photo)}" in neither.stderr
    assert f"with --mask the file whose SHA-256 digest is {digest(mask)}" in neither.stderr
    no_mask = cli(*arguments, "--edit", photo)
    assert no_mask.exit_code == 1
    assert "--edit" not in no_mask.stderr
    assert f"with --mask the file whose SHA-256 digest is {digest(mask)}" in no_mask.stderr
    assert bodies == []


def test_like_refuses_other_images_than_those_of_the_edit(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    like = like_of(tmp_path, photo, mask)
    arguments = ("generate", "--like", like, *HERE, "-o", tmp_path / "a.png")
    swapped = cli(*arguments, "--edit", mask, "--mask", photo)
    assert swapped.exit_code == 1
    for option, given, wanted in (("--edit", mask, photo), ("--mask", photo, mask)):
        assert f"{option} {given} is not the file that {like} was made from" in swapped.stderr
        assert f"is {digest(given)}, and the recipe's is {digest(wanted)}" in swapped.stderr
    other_mask = cli(*arguments, "--edit", photo, "--mask", photo)
    assert other_mask.exit_code == 1
    assert "--edit" not in other_mask.stderr
    assert len(other_mask.stderr.splitlines()) == 1
    assert bodies == []


def test_a_recipe_without_a_mask_takes_one(
    cli: Cli, bodies: list[dict[str, Any]], photo: Path, mask: Path, tmp_path: Path
) -> None:
    like = like_of(tmp_path, photo, None, strength=0.6)
    arguments = ("generate", "--like", like, "--edit", photo, *HERE, "-o", tmp_path / "a.png")
    assert cli(*arguments).exit_code == 0
    assert cli(*arguments, "--mask", mask, "--force").exit_code == 0
    without, with_mask = bodies
    assert "mask" not in without
    assert "paste_back" not in without
    assert base64.b64decode(with_mask["mask"]) == mask.read_bytes()
    assert with_mask["strength"] == 0.6


def test_a_damaged_recipe_of_an_edit_is_named(
    cli: Cli, photo: Path, mask: Path, tmp_path: Path
) -> None:
    recipe = {"prompt": "a star", "image_sha256": digest(photo), "paste_back": "maybe"}
    like = tmp_path / "like.png"
    like.write_bytes(encode_image(np.zeros((8, 8, 3), np.uint8), OutputSpec(), recipe))
    result = cli("generate", "--like", like, "--edit", photo, "--mask", mask, *HERE)
    assert result.exit_code == 1
    assert "paste_back is 'maybe'" in result.stderr
    assert "(option --like)" in result.stderr


WRONG = {
    "no file": (["--edit", "nosuch.png"], "--edit nosuch.png: there is no such file"),
    "folder": (["--edit", "."], "--edit . is a folder"),
    "empty": (["--edit", "empty.png"], "--edit empty.png is empty"),
    "large": (["--edit", "large.png"], "--edit large.png is larger than the 2048 bytes"),
    "no mask": (["--edit", "photo.png", "--mask", "no.png"], "--mask no.png: there is no such"),
    "large mask": (["--edit", "photo.png", "--mask", "large.png"], "--mask large.png is larger"),
    "mask alone": (["--mask", "photo.png"], "--mask changes nothing without an image"),
    "strength": (["--strength", "1"], "--strength changes nothing without an image"),
    "feather": (["--feather", "1"], "--feather changes nothing without an image"),
    "crop": (["--crop", "auto"], "--crop changes nothing without an image"),
    "paste back": (["--no-paste-back"], "--paste-back changes nothing without an image"),
}


@pytest.mark.parametrize("where", [HERE, ()], ids=["url", "here"])
@pytest.mark.parametrize("case", WRONG, ids=list(WRONG))
def test_a_wrong_option_is_one_sentence(
    cli: Cli,
    bodies: list[dict[str, Any]],
    photo: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    where: tuple[str, ...],
) -> None:
    monkeypatch.chdir(photo.parent)
    Path("empty.png").touch()
    Path("large.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(2041))
    Path("small.yaml").write_text(
        "limits: {max_input_bytes: 2048}\npools: [{name: a, model: shapes-sd}]", encoding="utf-8"
    )
    arguments, sentence = WRONG[case]
    result = cli("generate", "x", *arguments, *where, "--config", "small.yaml")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert bodies == []


def test_a_real_service_makes_a_job_of_it(
    cli: Cli, served: Served, photo: Path, mask: Path, tmp_path: Path
) -> None:
    here = ("--url", served.url, "--api-key", "secret", "-o", tmp_path / "a.png")
    result = cli(
        *("generate", "a star", "--edit", photo, "--mask", mask, "--strength", 0.5),
        *("--feather", 3, "--steps", 8, "--seed", 5, *here),
    )
    assert result.exit_code == 0, result.output
    (made,) = served.made
    edit = made.edit
    assert edit is not None
    assert edit.mask is not None
    assert (edit.image.sha256, edit.mask.sha256) == (digest(photo), digest(mask))
    assert (edit.strength, edit.feather_px, edit.paste_back) == (0.5, 3, True)
    assert (made.num_steps, made.schedule_steps) == (4, 8)
    assert "seed 5  64x64  " in result.stdout


def test_what_a_real_service_refuses_is_one_sentence(
    cli: Cli, served: Served, photo: Path, mask: Path, tmp_path: Path
) -> None:
    here = ("--url", served.url, "--api-key", "secret", "-o", tmp_path / "a.png")
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(photo.read_bytes()[:-30])
    refused = {
        ("--edit", damaged): "'image' cannot be decoded",
        ("--edit", photo, "--mask", photo): "'mask' has no alpha channel",
        ("--edit", photo, "--feather", 9): "'feather_px' changes nothing without a mask",
        ("--edit", photo, "--mask", mask, "--no-paste-back", "--crop", "auto"): "'paste_back'",
    }
    for arguments, sentence in refused.items():
        result = cli("generate", "a star", *arguments, *here)
        assert result.exit_code == 1
        assert sentence in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert served.jobs() == []
