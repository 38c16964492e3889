"""The command line as a whole: help, versions, and how fast it answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import Cli

COMMANDS = [(), ("serve",), ("generate",), ("jobs",), ("models",), ("doctor",)]
COMMANDS += [("models", name) for name in ("list", "train", "publish", "evaluate")]
COMMANDS += [("settings", name) for name in ("show", "apply")]
COMMANDS += [("jobs", name) for name in ("list", "show", "watch", "cancel", "fetch")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    if command not in {(), ("jobs",), ("models",)}:
        assert f"ray-cluster {' '.join(command)}" in result.output, "an example is missing"


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from ray_cluster.cli.app import app; app(['generate', '--help'], "
        "standalone_mode=False); "
        "print([name for name in ('torch', 'ray', 'diffusers', 'fastapi', 'numpy') "
        "if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["version", "--version"])
def test_version_is_printed(cli: Cli, command: str) -> None:
    result = cli(command)
    assert result.exit_code == 0
    assert result.output.startswith("ray-cluster ")
