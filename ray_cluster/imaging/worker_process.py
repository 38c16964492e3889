"""A child process that runs one function on framed messages, for as long as its parent lives.

Not ``multiprocessing``: its children import the parent's main module again, which in a Ray worker
is Ray. This child imports the function's module alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

from ray_cluster.errors import RayClusterError, RequestFailed

# lengths of header (JSON) and payload
_FRAME = struct.Struct("!IQ")
_CLOSE_TIMEOUT_S = 5.0

Task = Callable[[dict[str, Any], bytes], bytes]


class ProcessDied(RayClusterError):
    """The child ended without an answer."""


class CoderProcess:
    """The parent's end: start, run jobs one at a time, close.

    Args:
        module: imported by the child.
        function: name of a ``Task`` in it.
    """

    def __init__(self, module: str, function: str) -> None:
        # the child finds modules where this process does, whatever changed the path since
        code = (
            f"import sys; sys.path = {sys.path!r}; "
            f"from ray_cluster.imaging.worker_process import main; main({module!r}, {function!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # a Ctrl-C for the foreground group ends the parent, and that ends the child
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to_child: IO[bytes] = self._process.stdin
        self._from_child: IO[bytes] = self._process.stdout

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def run(self, header: bytes, payload: bytes) -> bytes:
        """Return what the function returns for a JSON object and bytes.

        Raises:
            RequestFailed: the function raised.
            ProcessDied: the child ended; close this and start another.
        """
        if self._to_child.closed:
            raise ProcessDied(f"process {self.pid} was ended before the job")
        try:
            _write(self._to_child, header, payload)
            reply, result = _read(self._from_child)
        except (BrokenPipeError, EOFError) as error:
            raise ProcessDied(f"process {self.pid} ended during a job") from error
        if "error" in reply:
            raise RequestFailed(reply["error"], "coding")
        return result

    def close(self) -> None:
        """End the process and wait for it."""
        # a broken pipe: dead already, with a job half written
        with contextlib.suppress(BrokenPipeError):
            self._to_child.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from_child.close()


def main(module: str, function: str) -> None:
    """Serve jobs in the child until the parent closes the pipe or dies."""
    source = sys.stdin.buffer
    # whatever prints to stdout must not end up between the frames
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task: Task = getattr(importlib.import_module(module), function)
    try:
        while True:
            header, payload = _read(source)
            reply, result = _answer(task, header, payload)
            _write(sink, reply, result)
    except (EOFError, BrokenPipeError):
        # the parent is done or dead; without flushing what nobody reads
        os._exit(0)


def _answer(task: Task, header: dict[str, Any], payload: bytes) -> tuple[bytes, bytes]:
    try:
        return b"{}", task(header, payload)
    except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        # anything else ends the child: then the parent tries again with a new one
        message = f"{type(error).__name__}: {error}"
        return json.dumps({"error": message}).encode(), b""


def _write(pipe: IO[bytes], header: bytes, payload: bytes) -> None:
    pipe.write(_FRAME.pack(len(header), len(payload)) + header)
    pipe.write(payload)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    header_length, payload_length = _FRAME.unpack(_read_exactly(pipe, _FRAME.size))
    header: dict[str, Any] = json.loads(_read_exactly(pipe, header_length))
    return header, _read_exactly(pipe, payload_length)


def _read_exactly(pipe: IO[bytes], num_bytes: int) -> bytes:
    content = pipe.read(num_bytes)
    if len(content) < num_bytes:
        raise EOFError(f"{len(content)} of {num_bytes} bytes came")
    return content
