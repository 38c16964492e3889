"""What Ray writes to a driver's standard output by itself, as one warning each."""

from __future__ import annotations

import io
import re

from ray_cluster.cli.output import warn

# the first line of a message: its origin, perhaps coloured, and text
_FIRST_LINE = re.compile(r"^(?:\x1b\[\d+m)?\((?:raylet|autoscaler)[^)]*\)(?:\x1b\[0m)? (.+)$")


class RayMessages(io.TextIOBase):
    """Stands in for standard output while only Ray writes there.

    A thread of Ray's prints what raylets report, whatever ``log_to_driver`` says: the death of a
    worker takes it ten lines of numbers. Here it takes one sentence, on standard error.
    """

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        """Take in a part of the output."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            first = _FIRST_LINE.match(line)
            if first is not None:
                warn(f"Ray: {first.group(1).partition('. ')[0].rstrip('.')}")
        return len(text)
