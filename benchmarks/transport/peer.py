"""The other end: it answers each question with frames of the size that it names."""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np

from ray_cluster.transport.connecting import listen
from ray_cluster.transport.links import Bytes, Link, LinkClosed

NUM_FRAMES = 13


def answer(link: Link) -> None:
    """Answer until the link is closed."""
    made: dict[int, list[Bytes]] = {}
    with contextlib.suppress(LinkClosed):
        while True:
            question = link.receive()
            num_bytes = int(question.head)
            question.release()
            if num_bytes not in made:
                made[num_bytes] = [np.ones(num_bytes // NUM_FRAMES, np.uint8)] * NUM_FRAMES
            link.send(question.head, made[num_bytes])
    link.close()


def main() -> None:
    """Listen, and say where."""
    listener = listen("127.0.0.1", answer)
    sys.stdout.write(f"{listener.target} {listener.secret}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
