"""A small question, and an answer of the size of a ControlNet's residuals, over every link."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.harness import Case, Plot, Study
from benchmarks.transport.peer import NUM_FRAMES, answer
from ray_cluster.transport.connecting import connect
from ray_cluster.transport.in_process import pair
from ray_cluster.transport.links import Link

_KIB = 1024
# latents of 64 px with guidance
_QUESTION = np.zeros(16 * _KIB, np.uint8)
# of answers: one row of a 64 px model, four, of SD1.5 and of SDXL
_SIZES_KIB = (108, 432, 4 * _KIB, 108 * _KIB)


def measure(study: Study) -> None:
    """Measure every size over every link, in turns."""
    study.found["what"] = (
        f"round trips: a question of 16 KiB, an answer in {NUM_FRAMES} frames, read once where it "
        "lies, and released; wall time"
    )
    with _links() as links:
        for size_kib in study.each(study.pick(_SIZES_KIB, (108, 4096))):
            rounds = study.pick(300, 3) // (10 if study.pick(size_kib, 0) > 16 * _KIB else 1)
            ways = {kind: partial(_trip, link, size_kib * _KIB) for kind, link in links.items()}
            study.compare("round trips", Case({"KiB": size_kib}, ways, rounds, clock="wall"))
    study.plots.append(Plot("round trips", "KiB", ("wall_ms",), ("by",), is_log=True))


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


def _trip(link: Link, num_bytes: int) -> None:
    link.send(str(num_bytes).encode(), [_QUESTION])
    message = link.receive()
    for frame in message.frames:
        # as numbers of eight bytes, fast enough to be bound by memory
        frame[: frame.nbytes // 8 * 8].view(np.uint64).max(initial=0)
    message.release()
