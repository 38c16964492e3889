"""What Ray and Serve write, cut to what a user needs; what a start of Ray waits for."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from ray_cluster.cli.output import warn

# the first line of a message: its origin, perhaps coloured, and text
_FIRST_LINE = re.compile(r"^(?:\x1b\[\d+m)?\((?:raylet|autoscaler)[^)]*\)(?:\x1b\[0m)? (.+)$")
_OURS = re.compile(r"ray_cluster(?:\.\w+)*\.[A-Z]\w+: (.+)")
# Ray's processes in the order in which it starts them, by a part of their command lines
_PARTS = {
    "gcs/gcs_server": "its control store",
    "dashboard/dashboard.py": "its dashboard",
    "raylet/raylet": "its node and agents",
}
# from which a start is worth a word, and between two looks at it
_SLOW_S = 4.0
_LOOK_S = 1.0
# since the program began: then a busy machine is told of as such, instead of minutes later by Ray
_GIVE_UP_S = 165.0
# above it a process waits longer for a CPU than Ray waits for the process
BUSY_LOAD = 4.0
_ANY_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$", re.MULTILINE)


class RayMessages(io.TextIOBase):
    """Stands in for standard output while only Ray writes there.

    A thread of Ray's prints what raylets report, whatever ``log_to_driver`` says: ten lines for the
    death of a worker. Here each report is one sentence on standard error.
    """

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        """Accept a part of the output."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            first = _FIRST_LINE.match(line)
            if first is not None:
                warn(f"Ray: {first.group(1).partition('. ')[0].rstrip('.')}")
        return len(text)


def own_error(message: str) -> str | None:
    """Return the message of the last error of ours in a traceback, if there is one."""
    found = _OURS.findall(message)
    return str(found[-1]).strip() if found else None


def short_reason(message: str) -> str:
    """Return the most telling line of a traceback."""
    own = own_error(message)
    if own is not None:
        return own
    errors = _ANY_ERROR.findall(message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return str(errors[-1]) if errors else (lines[-1] if lines else "no reason given")


class StartWatch:
    """While it is entered, says what a start of Ray waits for, once that takes long.

    A start that takes minutes because the machine is busy is ended: what waits is killed.

    Args:
        say: gets the words, in a thread of the watch's own.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known = set(_children())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StartWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        wait_s = _SLOW_S
        while not self._is_over.wait(wait_s):
            lines = [_command_line(one) for one in self.started()]
            waited = [what for part, what in _PARTS.items() if any(part in one for one in lines)]
            words = f"starting, waiting for {waited[-1] if waited else 'its first process'}"
            self._say(", ".join([words, *filter(None, [busy_words()])]))
            wait_s = _LOOK_S
            if busy_words() and seconds_since_start() > _GIVE_UP_S:
                self._end_what_waits()

    def _end_what_waits(self) -> None:
        # whoever asks the store would wait a minute for a dead one
        store = next(iter(_PARTS))
        for one in self.started():
            if store not in _command_line(one):
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def started(self) -> list[psutil.Process]:
        """Return the processes below this one that were not there before."""
        return [one for one in _children() if one not in self._known]


def seconds_since_start() -> float:
    """Return how long this process has run."""
    return time.time() - psutil.Process().create_time()


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def busy_words() -> str | None:
    """Say that the processors have far more to do than they can; None where they have not."""
    load, count = os.getloadavg()[0], psutil.cpu_count() or 1
    if load < BUSY_LOAD * count:
        return None
    return f"on a busy machine (load {load:.0f} on {count} CPUs)"


def start_failure(error: Exception, listening: str | None) -> str:
    """Return why Ray did not start, from what it raises.

    Where its dashboard fails, Ray raises the last lines of that one's log, whose errors may be
    harmless; of a raylet that is late it knows nothing more.

    Args:
        listening: why something cannot listen where it has to, if that is so.
    """
    text = str(error)
    if listening is not None:
        return listening
    what = "its dashboard" if "/dashboard." in text else "one of its processes"
    if what == "its dashboard" or "timed out" in text.lower():
        busy = busy_words()
        advice = "see its logs in session_latest/logs below ray.temp_dir, by default /tmp/ray"
        if busy is not None:
            advice = "end other programs, or try again when it has less to do"
        return f"{what} did not answer in time{'' if busy is None else ' ' + busy}; {advice}"
    return short_reason(text)
