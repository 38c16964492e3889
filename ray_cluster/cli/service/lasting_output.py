"""Standard streams whose reader may go away while the service still has to stop in order."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO


class LastingOutput(io.TextIOBase):
    """A standard stream that outlives its terminal, or the process at the other end of a pipe.

    Ctrl-C ends that process, too. What is written after it is dropped; no write fails.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether it was a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """As of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write and flush."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # not only dropped here: Python flushes the rest at its exit, and would end with 120
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        return len(text)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Have standard output and standard error last within the block."""
    with redirect_stdout(LastingOutput(sys.stdout)), redirect_stderr(LastingOutput(sys.stderr)):
        yield
