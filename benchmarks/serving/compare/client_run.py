"""Starts the open-loop client and reads what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.serving.compare.client import Answer, Usage

# beyond the last answer: start, reading and writing
_SPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClientRun:
    """What a client saw, answers in the order of the calls."""

    answers: tuple[Answer, ...]
    usage: Usage


def run_client(
    url: str, calls: Sequence[tuple[float, dict[str, Any]]], *, timeout_s: float
) -> ClientRun:
    """Make the calls at their instants from a process of its own; see the client's ``call_all``."""
    with tempfile.TemporaryDirectory(prefix="client-") as name:
        plan, answers = Path(name) / "plan.json", Path(name) / "answers.json"
        rows = [{"at_s": at_s, "body": body} for at_s, body in calls]
        text = json.dumps({"url": url, "timeout_s": timeout_s, "calls": rows})
        plan.write_text(text, encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "benchmarks.serving.compare.client", str(plan), str(answers)],
            cwd=ROOT,
            check=True,
            timeout=max(at_s for at_s, _ in calls) + timeout_s + _SPARE_S,
        )
        found = json.loads(answers.read_text(encoding="utf-8"))
    return ClientRun(
        tuple(Answer(**row | {"body": row["body"].encode()}) for row in found["answers"]),
        Usage(**found["usage"]),
    )
