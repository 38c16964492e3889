"""An open-loop client, in a process of its own: arrivals never wait for answers.

``python -m benchmarks.serving.compare.client plan.json answers.json``. It imports little and looks
at answers only when all have come, so that it takes little of a machine that it shares with what it
measures.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

_PATH = "/v1/images/generations"
# from reading the plan to the first arrival
_LEAD_S = 0.3


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call.

    Attributes:
        late_send_s: from the instant it was planned for until it was sent.
        latency_s: from that instant to the last byte of the answer; None without an answer.
        status: of HTTP; None without an answer.
        body: of the answer.
        problem: what went wrong on the way.
    """

    late_send_s: float
    latency_s: float | None = None
    status: int | None = None
    body: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the client took.

    Attributes:
        cpu_s: CPU seconds of its process, from the first arrival to the last answer.
        wall_s: the same on the wall clock.
    """

    cpu_s: float
    wall_s: float


async def call_all(
    url: str, calls: Sequence[tuple[float, dict[str, Any]]], *, timeout_s: float
) -> tuple[list[Answer], Usage]:
    """Make every call at its instant; return the answers in the order of the calls.

    Args:
        url: of the service.
        calls: seconds from the beginning, and the body.
        timeout_s: after which an answer counts as lost.
    """
    loop = asyncio.get_running_loop()
    # without limits: a call that waits for a connection would be sent late
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
        usage = Usage(time.process_time() - cpu_s, loop.time() - begin_s)
    return answers, usage


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


def main() -> int:
    """Read a plan, carry it out, write the answers."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    calls = [(one["at_s"], one["body"]) for one in plan["calls"]]
    answers, usage = asyncio.run(call_all(plan["url"], calls, timeout_s=plan["timeout_s"]))
    rows = [
        asdict(answer) | {"body": answer.body.decode("utf-8", errors="replace")}
        for answer in answers
    ]
    text = json.dumps({"usage": asdict(usage), "answers": rows})
    Path(sys.argv[2]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
