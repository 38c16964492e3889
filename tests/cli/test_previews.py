"""``generate --previews``: files beside the image, until the image is there."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cli.conftest import Cli
from tests.cli.served import Served


def here(served: Served) -> tuple[object, ...]:
    return ("--url", served.url, "--api-key", "secret")


def test_previews_are_shown_beside_the_image_until_it_is_there(
    cli: Cli, served: Served, tmp_path: Path
) -> None:
    options = ("--steps", 40, "--previews", 3, "-o", tmp_path / "a.png", *here(served))
    seen: set[bytes] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            seen.update(path.read_bytes() for path in tmp_path.glob("*-preview.png"))

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        result = cli("generate", "x", *options)
        is_over.set()
        looking.result()
    assert result.exit_code == 0, result.output
    assert f"preview in {tmp_path / 'a-preview.png'}" in result.stderr.replace("\n", "")
    assert seen
    assert seen <= {b"preview 0", b"preview 1", b"preview 2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "served"]


def test_a_preview_does_not_overwrite_a_file(cli: Cli, served: Served, tmp_path: Path) -> None:
    (tmp_path / "a-preview.png").write_bytes(b"mine")
    options = ("--previews", 1, "-o", tmp_path / "a.png", *here(served))
    result = cli("generate", "x", *options)
    assert result.exit_code == 1
    assert "a-preview.png exists already" in result.stderr.replace("\n", "")
    assert served.made == []


def test_previews_are_told_of_and_change_nothing(
    cli: Cli, tiny_config: Path, tmp_path: Path
) -> None:
    plain, shown = tmp_path / "plain.png", tmp_path / "shown.png"
    options = ("--seed", 5, "--size", "96x96", "--steps", 100, "--config", tiny_config)
    assert cli("generate", "a red circle", *options, "-o", plain).exit_code == 0
    # on a busy machine a whole image may be made between two looks
    for _ in range(3):
        result = cli("generate", "a red circle", *options, "--previews", 3, "--force", "-o", shown)
        assert result.exit_code == 0, result.output
        told = result.stderr.replace("\n", "")
        if is_told := re.search(r"step (25|50|75): preview in .*shown-preview\.png", told):
            break
    assert is_told
    assert plain.read_bytes() == shown.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["plain.png", "shown.png"]
