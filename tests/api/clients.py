"""The official client, the current one and an older one, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OLDER_CLIENT = Path(sys.prefix) / "openai-1"


def run_scenario(script: str, *arguments: str, older: bool) -> None:
    """Run a script that prints its client's version, by a client."""
    environment = dict(os.environ)
    if older:
        assert OLDER_CLIENT.is_dir(), "the Makefile installs it: run `make venv`"
        environment["PYTHONPATH"] = str(OLDER_CLIENT)
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split(".")[0] == "1") is older
