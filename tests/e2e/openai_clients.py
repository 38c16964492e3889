"""The official client, of the current version and an older one, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e import openai_scenario
from tests.e2e.service import API_KEY, POISONED_WORD, Reached

OLDER_CLIENT = Path(sys.prefix) / "openai-1"


def client_that_works(service: Reached, path: Path | None = None) -> str:
    """Run the client's scenario, which must succeed; return the client's version.

    Args:
        path: where to import it from, instead of what the tests have.
    """
    environment = dict(os.environ) | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run(
        [sys.executable, openai_scenario.__file__, service.url, API_KEY, POISONED_WORD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]
