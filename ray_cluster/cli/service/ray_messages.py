"""What Ray and Serve write, cut to what a user needs."""

from __future__ import annotations

import io
import re

from ray_cluster.cli.output import warn

# the first line of a message: its origin, perhaps coloured, and text
_FIRST_LINE = re.compile(r"^(?:\x1b\[\d+m)?\((?:raylet|autoscaler)[^)]*\)(?:\x1b\[0m)? (.+)$")
_OURS = re.compile(r"ray_cluster(?:\.\w+)*\.[A-Z]\w+: (.+)")
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
