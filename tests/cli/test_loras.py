"""``loras`` and ``generate --lora`` against the real HTTP application, and in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ray_cluster.cli.images.lora_options import loras_of_recipe, parse_loras
from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.encoder import encode_image, read_recipe
from ray_cluster.models.builtin import weights_folder
from ray_cluster.requests import AddOns, LoraUse, OutputSpec
from tests.cli.conftest import Cli
from tests.cli.pictures import pixels_of
from tests.cli.served import Served
from tests.fakes import image_request

PASTEL = weights_folder() / "pastel" / "pytorch_lora_weights.safetensors"
SMALL = ("--seed", 3, "--size", "64x64", "--steps", 2)


def here(served: Served, *more: object) -> tuple[object, ...]:
    return ("--url", served.url, "--api-key", "secret", *more)


def add(cli: Cli, served: Served, name: str, *more: object) -> Any:
    source = ("--base", "shapes", "--source", f"builtin:{name}")
    return cli("loras", "add", name, *source, *more, *here(served))


def test_loras_are_registered_listed_and_removed(cli: Cli, served: Served) -> None:
    assert cli("loras", "list", *here(served)).stderr == "no LoRAs\n"
    added = add(cli, served, "pastel", "--pinned", "--sha256", "0f" * 32)
    assert added.exit_code == 0, added.output
    assert added.stdout.startswith("pastel  ")
    assert added.stdout.endswith("for shapes from builtin:pastel\n")
    assert add(cli, served, "pastel", "--pinned", "--sha256", "0f" * 32).exit_code == 0
    other = add(cli, served, "pastel")
    assert other.exit_code == 1
    assert "with another sha256, pinned" in other.stderr
    assert add(cli, served, "outline").exit_code == 0
    listed = cli("loras", "list", *here(served)).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["outline", "pastel"]
    assert "(pinned)" in listed[1]
    as_json = json.loads(cli("loras", "list", "--json", "--limit", 1, *here(served)).stdout)
    assert [one["name"] for one in as_json] == ["outline"]
    removed = cli("loras", "remove", "pastel", "nothing", "outline", *here(served))
    assert removed.exit_code == 1
    assert [line.split()[0] for line in removed.stdout.splitlines()] == ["pastel", "outline"]
    assert removed.stderr.startswith("error: There is no LoRA 'nothing'")
    assert cli("loras", "list", *here(served)).stderr == "no LoRAs\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a b", "--base", "shapes", "--source", "builtin:a"), "1 to 64 letters"),
        (("a", "--base", "nothing", "--source", "builtin:a"), "'nothing' does not exist"),
        (("a", "--base", "shapes", "--source", ""), "not empty"),
    ],
)
def test_a_wrong_registration_is_one_sentence(
    cli: Cli, served: Served, arguments: tuple[str, ...], said: str
) -> None:
    result = cli("loras", "add", *arguments, *here(served))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_key_is_asked_for_and_a_service_that_is_away_is_an_error(
    cli: Cli, served: Served, free_port: int
) -> None:
    commands = (
        ("list",),
        ("remove", "a"),
        ("add", "a", "--base", "shapes", "--source", "builtin:a"),
    )
    for command in commands:
        wrong = cli("loras", *command, "--url", served.url, "--api-key", "wrong")
        assert wrong.exit_code == 1, command
        assert wrong.stderr.startswith("error: The API key is not valid"), command
        away = cli("loras", *command, "--url", f"http://127.0.0.1:{free_port}")
        assert away.exit_code == 1, command
        assert "cannot be reached" in away.stderr, command


# generate


def test_loras_reach_the_service_and_the_job_shows_them(
    cli: Cli, served: Served, tmp_path: Path
) -> None:
    for name in ("pastel", "outline"):
        assert add(cli, served, name).exit_code == 0
    options = ("--lora", "pastel:0.8", "--lora", "outline", "-o", tmp_path / "a.png")
    unknown = cli("generate", "x", "--lora", "pastell", *here(served), "-o", tmp_path / "b.png")
    assert unknown.exit_code == 1
    assert "Did you mean 'pastel'?" in unknown.stderr
    assert "(option --lora)" in unknown.stderr
    result = cli("generate", "x", *options, *here(served))
    assert result.exit_code == 0, result.output
    [made] = served.made
    assert [(one.name, one.scale) for one in made.add_ons.loras] == [
        ("pastel", 0.8),
        ("outline", 1.0),
    ]
    assert all(one.lora_id for one in made.add_ons.loras)
    [job] = served.jobs()
    assert job["loras"] == [{"name": "pastel", "scale": 0.8}, {"name": "outline", "scale": 1.0}]
    shown = cli("jobs", "show", job["id"], *here(served)).stdout
    assert "loras      pastel:0.8, outline:1" in shown


def test_like_repeats_the_loras_of_a_png(cli: Cli, served: Served, tmp_path: Path) -> None:
    assert add(cli, served, "pastel").exit_code == 0
    use = AddOns(loras=(LoraUse("pastel", 0.8, "other-id"),))
    recipe = image_request(model="shapes", seed=5, num_steps=4, add_ons=use).recipe()
    png = encode_image(np.zeros((64, 64, 3), np.uint8), OutputSpec(), recipe)
    (tmp_path / "like.png").write_bytes(png)
    like = ("generate", "--like", tmp_path / "like.png", *here(served))
    assert cli(*like, "-o", tmp_path / "a.png").exit_code == 0
    assert cli(*like, "--lora", "pastel:-1", "-o", tmp_path / "b.png").exit_code == 0
    assert [one.add_ons.loras[0].scale for one in served.made] == [0.8, -1.0]
    # an id is of its service; a name may mean another one elsewhere
    assert "other-id" not in {one.add_ons.loras[0].lora_id for one in served.made}


def test_a_file_is_nothing_for_a_service(cli: Cli, served: Served, tmp_path: Path) -> None:
    options = ("--lora", PASTEL, *here(served), "-o", tmp_path / "a.png")
    result = cli("generate", "x", *options)
    assert result.exit_code == 1
    assert "loras add" in result.stderr
    assert served.jobs() == []


WORDS = ("a red circle", *SMALL)


@pytest.fixture
def made(cli: Cli, tmp_path: Path) -> Callable[..., bytes]:
    """Makes an image here, in a file of a name; returns its pixels."""

    def make(name: str, *options: object) -> bytes:
        path = tmp_path / f"{name}.png"
        result = cli("generate", *options, "-o", path)
        assert result.exit_code == 0, result.output
        return pixels_of(path).tobytes()

    return make


@pytest.mark.slow
def test_loras_are_added_up_by_their_scales(made: Callable[..., bytes], tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    shutil.copy(PASTEL, copy)
    styled = made("styled", *WORDS, "--lora", "pastel:0.8")
    assert made("by-file", *WORDS, "--lora", f"{copy}:0.8") == styled
    assert made("zero", *WORDS, "--lora", "pastel:0") == made("plain", *WORDS)
    assert made("both", *WORDS, "--lora", "pastel:0.8", "--lora", "outline") != styled
    assert made("again", "--like", tmp_path / "styled.png") == styled


def test_a_lora_changes_the_image_and_like_makes_it_again(
    made: Callable[..., bytes], tmp_path: Path
) -> None:
    plain = made("plain", *WORDS)
    styled = made("styled", *WORDS, "--lora", "pastel:0.8")
    assert styled != plain
    late = made("late", *WORDS, "--lora", "pastel:0.8", "--lora-start-step", 1)
    assert late not in {plain, styled}
    assert made("late-again", "--like", tmp_path / "late.png") == late
    assert read_recipe((tmp_path / "late.png").read_bytes())["lora_start_step"] == "1"
    recipe = read_recipe((tmp_path / "styled.png").read_bytes())
    assert json.loads(recipe["loras"]) == [{"name": "pastel", "scale": 0.8}]


WRONG = {
    "no number": (("--lora", "pastel:much"), "write NAME or NAME:SCALE"),
    "nan": (("--lora", "pastel:nan"), "write NAME or NAME:SCALE"),
    "no name": (("--lora", ":1"), "write NAME or NAME:SCALE"),
    "unknown": (("--lora", "nothing"), "built-in are outline, pastel, texture"),
    "no file": (("--lora", "./nothing.safetensors"), "there is no such file"),
    "empty folder": (("--lora", "./folder"), "./folder: it has 0 files of .safetensors"),
    "pickle": (("--lora", "./a.bin"), "can hold programs"),
    "scale": (
        ("--lora", "pastel:5"),
        "[0].scale' must be at most 4; given 5.0. (option --lora)",
    ),
    "twice": (("--lora", "pastel", "--lora", "pastel:0.5"), "twice"),
    "fidelity": (("--lora", "pastel", "--fidelity", "fast"), "measured without LoRAs"),
    "too late": (("--lora", "pastel", "--lora-start-step", "2"), "must be less than the steps"),
    "no late lora": (("--lora-start-step", "1"), "changes nothing without LoRAs"),
    "not a lora": (("--lora", "./text.safetensors"), "cannot be read as safetensors"),
    "other base": (("--lora", "pastel", "--model", "shapes-sd3"), "is made for another model"),
}


def test_a_file_is_found_behind_a_hubs_link_and_by_a_long_path(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / ("far" * 30)
    folder.mkdir()
    blob, link = folder / "0123abcd", folder / "lora.safetensors"
    shutil.copy(PASTEL, blob)
    link.symlink_to(blob.name)
    named, linked, again = (tmp_path / f"{name}.png" for name in ("named", "linked", "again"))
    for lora, out in (("pastel", named), (link, linked)):
        made = cli("generate", "a red circle", "--lora", lora, *SMALL, "-o", out)
        assert made.exit_code == 0, made.output
    assert np.array_equal(pixels_of(named), pixels_of(linked))
    # its recipe says where it is
    repeated = cli("generate", "--like", linked, "-o", again)
    assert repeated.exit_code == 0, repeated.output
    assert linked.read_bytes() == again.read_bytes()


def test_what_peft_saves_is_read_with_its_configuration(cli: Cli, tmp_path: Path) -> None:
    # twice the alpha is twice the scale
    factors = {
        key.replace("unet.", "base_model.model.", 1): one for key, one in load_file(PASTEL).items()
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    images = {}
    for lora in ("pastel", folder, folder / "adapter_model.safetensors"):
        scale, out = 1 if lora == "pastel" else 0.5, tmp_path / f"{len(images)}.png"
        made = cli("generate", *WORDS, "--lora", f"{lora}:{scale}", "-o", out)
        assert made.exit_code == 0, made.output
        images[str(lora)] = pixels_of(out).tobytes()
    assert len(set(images.values())) == 1


@pytest.mark.parametrize("case", WRONG, ids=list(WRONG))
def test_a_wrong_lora_is_one_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "text.safetensors"):
        (tmp_path / name).write_text("some text")
    (tmp_path / "folder").mkdir()
    arguments, said = WRONG[case]
    result = cli("generate", "x", *SMALL, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.png"))


def test_what_options_and_recipes_mean() -> None:
    assert parse_loras(["a", "b:0.5", "/x/y.safetensors:-1"]) == [
        {"name": "a"},
        {"name": "b", "scale": 0.5},
        {"name": "/x/y.safetensors", "scale": -1.0},
    ]
    with pytest.raises(InvalidRequest):
        parse_loras(["a:"])
    assert loras_of_recipe('[{"name": "a", "scale": 1.0}]') == [{"name": "a", "scale": 1.0}]
    for text in ("a", "{}", "[1]", ""):
        with pytest.raises(ValueError, match=r"list of LoRAs|Expecting value"):
            loras_of_recipe(text)
