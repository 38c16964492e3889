"""A child process that runs one function on framed messages, for as long as its parent lives.

Not ``multiprocessing``: its children import the parent's main module again, which in a Ray worker
is Ray. This child imports the function's module alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from ray_cluster.errors import InvalidRequest, RayClusterError, RequestFailed

# length of the header (JSON), number of parts; then the parts' lengths
_FRAME = struct.Struct("!IB")
_LENGTH = struct.Struct("!Q")
_CLOSE_TIMEOUT_S = 5.0
# from the end of a child's pipe to its own
_END_S = 1.0
_PARENT_CHECK_S = 1.0

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """A job or its result.

    Attributes:
        header: a JSON object.
        parts: bytes, at most 255 of them; those of a received message can be written to.
    """

    header: dict[str, Any]
    parts: tuple[Bytes, ...] = ()


Task = Callable[[Message], Message]


class ProcessDied(RayClusterError):
    """The child ended without an answer, or what came of one cannot be read."""


class JobTooLong(ProcessDied):
    """The child was ended because it took too long for a job."""


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
            f"from ray_cluster.imaging.processes.worker_process import main; "
            f"main({module!r}, {function!r}, {os.getpid()})"
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

    def run(self, job: Message, max_s: float) -> Message:
        """Return what the function returns for a job.

        Args:
            max_s: seconds after which the child is ended.

        Raises:
            InvalidRequest: the function raised this one.
            RequestFailed: the function raised another error.
            ProcessDied: close this and start another.
            JobTooLong: likewise.
        """
        if self._to_child.closed:
            raise ProcessDied(f"process {self.pid} was ended before the job")
        is_late = threading.Event()
        timer = threading.Timer(max_s, self._end_late, [is_late])
        timer.daemon = True
        timer.start()
        try:
            _write(self._to_child, job)
            reply = _read(self._from_child)
        except (ArithmeticError, EOFError, MemoryError, OSError, ValueError, struct.error) as error:
            # whatever it was, the rest of the exchange would be taken for the next job's
            if is_late.is_set():
                message = f"process {self.pid} was ended after {max_s:g} s of a job"
                raise JobTooLong(message) from error
            if isinstance(error, EOFError | BrokenPipeError) and self._is_out_of_time():
                message = f"process {self.pid} has used up the CPU time of a job"
                raise JobTooLong(message) from error
            raise ProcessDied(f"process {self.pid} ended during a job: {error!r}") from error
        finally:
            timer.cancel()
        return _result_of(reply)

    def _is_out_of_time(self) -> bool:
        """Whether the child has ended by the timer of :mod:`.allowance`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S) == -signal.SIGPROF
        return False

    def _end_late(self, is_late: threading.Event) -> None:
        is_late.set()
        self._process.kill()

    def kill(self) -> None:
        """End the process whatever it does: a job raises :class:`ProcessDied`; then close this."""
        self._process.kill()

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


def run_here(task: Task, job: Message) -> Message:
    """Run a job in this process.

    Raises:
        InvalidRequest, RequestFailed: as of :meth:`CoderProcess.run`.
    """
    return _result_of(_answer(task, job))


def _result_of(reply: Message) -> Message:
    if "invalid" in reply.header:
        raise InvalidRequest(*reply.header["invalid"])
    if "error" in reply.header:
        raise RequestFailed(reply.header["error"], "coding")
    return reply


def main(module: str, function: str, parent: int) -> None:
    """Serve jobs in the child until the parent, of that process id, closes the pipe or dies."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    source = sys.stdin.buffer
    # whatever prints to stdout must not end up between the frames
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task: Task = getattr(importlib.import_module(module), function)
    try:
        while True:
            _write(sink, _answer(task, _read(source)))
    except (EOFError, BrokenPipeError):
        # the parent is done or dead; without flushing what nobody reads
        os._exit(0)


def _end_with(parent: int) -> None:
    """End this process soon after its parent, though a job hangs."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


def _answer(task: Task, job: Message) -> Message:
    try:
        return task(job)
    except InvalidRequest as error:
        return Message({"invalid": [error.message, error.param, error.code]})
    except (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        # anything else ends the child: then the parent tries again with a new one
        return Message({"error": f"{type(error).__name__}: {error}"})


def _write(pipe: IO[bytes], message: Message) -> None:
    header = json.dumps(message.header).encode()
    lengths = (_LENGTH.pack(memoryview(part).nbytes) for part in message.parts)
    pipe.write(_FRAME.pack(len(header), len(message.parts)) + b"".join(lengths) + header)
    for part in message.parts:
        pipe.write(part)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Message:
    header_length, num_parts = _FRAME.unpack(_read_exactly(pipe, _FRAME.size))
    lengths = _LENGTH.iter_unpack(_read_exactly(pipe, num_parts * _LENGTH.size))
    header: dict[str, Any] = json.loads(_read_exactly(pipe, header_length))
    return Message(header, tuple(_read_exactly(pipe, length) for (length,) in lengths))


def _read_exactly(pipe: IO[bytes], num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    rest = memoryview(content)
    while rest:
        num_read = pipe.readinto(rest)  # type: ignore[attr-defined]
        if not num_read:
            raise EOFError(f"{num_bytes - len(rest)} of {num_bytes} bytes came")
        rest = rest[num_read:]
    return content
