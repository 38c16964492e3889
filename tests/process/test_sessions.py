"""Which children begin a session of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from ray_cluster.process.sessions import OwnSessions

pytestmark = pytest.mark.skipif(not hasattr(os, "setsid"), reason="needs sessions")


def nothing() -> None:
    """As Ray blocks signals and asks to die with its parent here."""


def session_of_child(preexec_fn: Callable[[], None] | None) -> int:
    command = [sys.executable, "-c", "import os; print(os.getsid(0))"]
    return int(subprocess.check_output(command, preexec_fn=preexec_fn, timeout=60))


def test_only_children_of_the_block_that_run_python_code_leave_the_session() -> None:
    ours = os.getsid(0)
    with OwnSessions():
        assert session_of_child(nothing) != ours
        assert session_of_child(None) == ours
    assert session_of_child(nothing) == ours
