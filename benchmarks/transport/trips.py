"""A small question, and an answer of the size of a ControlNet's residuals, over every link."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report import Section
from benchmarks.settings import Report
from benchmarks.stats import summarise
from benchmarks.transport.peer import NUM_FRAMES, answer
from ray_cluster.transport.connecting import connect
from ray_cluster.transport.in_process import pair
from ray_cluster.transport.links import Link

_KIB = 1024
# latents of 64 px with guidance
_QUESTION = np.zeros(16 * _KIB, np.uint8)


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Sizes and repetitions.

    Attributes:
        sizes_kib: of answers; one row of a 64 px model, four, of SD1.5 and of SDXL.
        rounds: round trips of each; a tenth of these for answers of more than 16 MiB.
    """

    sizes_kib: tuple[int, ...] = (108, 432, 4 * _KIB, 108 * _KIB)
    rounds: int = 300


def measure(settings: TransportSettings, report: Report) -> Section:
    """Measure every size over every link, in turns."""
    rows: list[dict[str, Any]] = []
    with _links() as links:
        for index, size_kib in enumerate(settings.sizes_kib):
            report(index / len(settings.sizes_kib), f"{size_kib} KiB")
            is_large = size_kib > 16 * _KIB
            rounds = max(3, settings.rounds // 10) if is_large else settings.rounds
            for kind, times_ms in _in_turns(links, size_kib * _KIB, rounds).items():
                rows.append({"link": kind, "KiB": size_kib, "ms": summarise(times_ms).as_dict()})
    return {
        "what": f"round trips: a question of 16 KiB, an answer in {NUM_FRAMES} frames, read once "
        "where it lies, and released; wall time",
        "tables": {"round trips": rows},
        "aims": [],
    }


@contextlib.contextmanager
def _links() -> Iterator[dict[str, Link]]:
    here, there = pair()
    thread = threading.Thread(target=answer, args=(there,))
    thread.start()
    command = [sys.executable, "-m", "benchmarks.transport.peer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        target, secret = peer.stdout.readline().split()
        links = [here, connect(target, secret), connect(target, secret, shares_memory=False)]
        try:
            yield {link.kind: link for link in links}
        finally:
            for link in links:
                link.close()
            thread.join()
            peer.kill()


def _in_turns(links: dict[str, Link], num_bytes: int, rounds: int) -> dict[str, list[float]]:
    for link in links.values():
        for _ in range(3):
            _trip_ms(link, num_bytes)
    times: dict[str, list[float]] = {kind: [] for kind in links}
    for _ in range(rounds):
        for kind, link in links.items():
            times[kind].append(_trip_ms(link, num_bytes))
    return times


def _trip_ms(link: Link, num_bytes: int) -> float:
    started_s = time.perf_counter()
    link.send(str(num_bytes).encode(), [_QUESTION])
    message = link.receive()
    for frame in message.frames:
        # as numbers of eight bytes, fast enough to be bound by memory
        frame[: frame.nbytes // 8 * 8].view(np.uint64).max(initial=0)
    message.release()
    return 1e3 * (time.perf_counter() - started_s)
