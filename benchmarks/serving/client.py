"""An open-loop client, in a process of its own: arrivals never wait for answers.

It reads answers only when all have come, so that it takes little of the machine that it shares with
the service.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import ROOT

_PATH = "/v1/images/generations"
# from reading the plan to the first arrival
_LEAD_S = 0.3
# beyond the last answer: start, reading and writing
_SPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call.

    Attributes:
        late_send_s: from the planned instant until it was sent.
        latency_s: from the planned instant to the last byte of the answer; None without an answer.
        status: of HTTP; None without an answer.
        problem: what went wrong on the way.
    """

    late_send_s: float
    latency_s: float | None = None
    status: int | None = None
    body: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ClientRun:
    """The answers in the order of the calls, and what the client itself took."""

    answers: tuple[Answer, ...]
    cpu_s: float
    wall_s: float


def run_client(
    url: str, calls: Sequence[tuple[float, dict[str, Any]]], *, timeout_s: float
) -> ClientRun:
    """Make the calls from another process, each at its instant in seconds from the beginning."""
    with tempfile.TemporaryDirectory(prefix="client-") as name:
        plan, answers = Path(name) / "plan.json", Path(name) / "answers.json"
        text = json.dumps({"url": url, "timeout_s": timeout_s, "calls": calls})
        plan.write_text(text, encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", __name__, str(plan), str(answers)],
            cwd=ROOT,
            check=True,
            timeout=max(at_s for at_s, _ in calls) + timeout_s + _SPARE_S,
        )
        found = json.loads(answers.read_text(encoding="utf-8"))
    rows = found.pop("answers")
    return ClientRun(tuple(Answer(**row | {"body": row["body"].encode()}) for row in rows), **found)


async def call_all(
    url: str, calls: Sequence[tuple[float, dict[str, Any]]], *, timeout_s: float
) -> ClientRun:
    """Make the calls from this process; see :func:`run_client`."""
    loop = asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        begin_s = loop.time() + _LEAD_S
        bodies = [(begin_s + at_s, json.dumps(body).encode()) for at_s, body in calls]
        gc.collect()
        gc.disable()
        cpu_s = time.process_time()
        try:
            answers = await asyncio.gather(*(_call(client, *one) for one in bodies))
        finally:
            gc.enable()
        return ClientRun(tuple(answers), time.process_time() - cpu_s, loop.time() - begin_s)


async def _call(client: httpx.AsyncClient, due_s: float, body: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(due_s - loop.time())
    late_s = loop.time() - due_s
    headers = {"Content-Type": "application/json", "X-Request-Start": f"t={time.time():.6f}"}
    try:
        reply = await client.post(_PATH, content=body, headers=headers)
    except httpx.HTTPError as error:
        return Answer(late_s, problem=f"{type(error).__name__}: {error}")
    return Answer(late_s, loop.time() - due_s, reply.status_code, reply.content)


def main() -> None:
    """Read a plan, carry it out, write the answers."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run = asyncio.run(call_all(plan["url"], plan["calls"], timeout_s=plan["timeout_s"]))
    found = asdict(run)
    for row in found["answers"]:
        row["body"] = row["body"].decode("utf-8", errors="replace")
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
