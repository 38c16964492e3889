"""``models list``: what is built in, and what a service has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_cluster.cli.models.model_list import card_lines
from ray_cluster.models.builtin import builtin_folder
from tests.cli.conftest import Cli


def test_built_in_models_are_listed(cli: Cli) -> None:
    result = cli("models", "list")
    assert result.exit_code == 0, result.output
    assert "shapes-sd" in result.output
    assert "apache-2.0" in result.output


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_loses_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli("models", "list").output.splitlines()
    assert max(len(line) for line in lines) <= width
    # a line for each, and its sentence below
    assert any(re.match(r"shapes-sd +model +\d+\.\d MB  apache-2.0", line) for line in lines)
    card = builtin_folder("shapes-sd")
    assert card is not None
    assert str(card.parent) in "".join(line.strip() for line in lines)
    first_sentence = card_lines(card)[1]
    assert set(first_sentence.split()) <= set(" ".join(lines).split())


def test_served_models_are_listed(cli: Cli, service_url: str) -> None:
    result = cli("models", "list", "--url", service_url, "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "shapes " in result.output
    served = result.output.partition("served at")[2]
    assert max(len(line) for line in served.splitlines()) <= 80
    assert "32 to 128 px" in result.output


def test_the_card_tells_licence_and_first_sentence(tmp_path: Path) -> None:
    assert card_lines(tmp_path) == ("-", "-")
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n\n# Shapes\n\nA model. More.\n")
    assert card_lines(tmp_path) == ("apache-2.0", "A model")
    card.write_text("# Shapes\n\n![a](b.png)\n\nDraws\nshapes. More.\n\nLicence: Apache-2.0.\n")
    assert card_lines(tmp_path) == ("Apache-2.0", "Draws shapes")
    card.write_text("# Shapes only\n")
    assert card_lines(tmp_path) == ("-", "-")


def test_a_key_without_a_service_is_refused(cli: Cli) -> None:
    result = cli("models", "list", "--api-key", "k")
    assert result.exit_code == 1
    assert "changes nothing without --url" in result.stderr
