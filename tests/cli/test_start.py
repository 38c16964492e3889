"""The command line as a whole: help, versions, and how fast it answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ray_cluster
from ray_cluster.cli.output import needs_extra
from tests.cli.conftest import Cli

COMMANDS = [(), ("serve",), ("generate",), ("jobs",), ("models",), ("doctor",)]
COMMANDS += [("models", name) for name in ("list", "fetch", "calibrate")]
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


def test_a_missing_extra_is_said_with_a_command_that_installs_it_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(ray_cluster.__file__).parents[1]
    monkeypatch.chdir(root)
    assert needs_extra("matplotlib").startswith("needs matplotlib: ")
    assert needs_extra("matplotlib").endswith("-m pip install -e '.[plots]' -c constraints.txt")
    monkeypatch.chdir(root / "docs")
    assert needs_extra("sklearn").endswith("-e '..[baselines]' -c ../constraints.txt")
    # installed, not a checkout
    monkeypatch.setattr(ray_cluster, "__file__", str(tmp_path / "ray_cluster" / "__init__.py"))
    assert needs_extra("sklearn") == "needs sklearn: pip install 'ray-cluster[baselines]'"
