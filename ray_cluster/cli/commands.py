"""How a command of this installation is written so that it works when pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8000"


def command(name: str = "ray-cluster") -> str:
    """Return the command by its name alone where PATH finds ours, else by its path."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not ours.is_file() or (found is not None and Path(found).samefile(ours)):
        return name
    near = os.path.relpath(ours)
    if near.startswith(os.pardir):
        return shlex.quote(str(ours))
    # a shell looks for a bare name in PATH only
    return shlex.quote(near if os.sep in near else os.path.join(os.curdir, near))


def jobs_command(action: str, job_id: str, base: str) -> str:
    """Return a command on a job of the service at ``base``."""
    text = f"{command()} jobs {action} {shlex.quote(job_id)}"
    return text if base == DEFAULT_URL else f"{text} --url {shlex.quote(base)}"
