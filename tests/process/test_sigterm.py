"""SIGTERM reaches an event loop whose thread is not the main one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys, threading, time
from ray_cluster.process.sigterm import TerminationNotice


async def main():
    end = asyncio.Event()
    notice = TerminationNotice(end.set)
    print("ready", flush=True)
    await end.wait()
    await asyncio.sleep(0.3)
    print("said", flush=True)
    os._exit(3)


def on_signal(*_):
    print("the main thread's own", flush=True)
    sys.exit(1)


signal.signal(signal.SIGTERM, on_signal)
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("num_signals", [1, 300])
def test_sigterm_calls_back_on_the_loop_and_nothing_else(num_signals: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"said\n"
    assert process.returncode == 3
