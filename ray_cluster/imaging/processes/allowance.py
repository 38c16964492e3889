"""What a job may use of the process that it runs in: memory and CPU time.

Both are bounded by the kernel, as no check in Python is reached while a decoder runs.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.imaging.decoding import header_of

# what ends a process that has used up its CPU time
OUT_OF_TIME = signal.SIGPROF
# of /proc/self/statm, in pages: what the process may write to, and shares with nobody
_DATA_FIELD = 5


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a job may use.

    Attributes:
        num_bytes: of memory, beside what the process has before it.
        cpu_s: seconds of all its threads together; 0 for no bound.
    """

    num_bytes: int
    cpu_s: float

    def plus(self, other: Allowance) -> Allowance:
        """Return what both together may use."""
        return Allowance(self.num_bytes + other.num_bytes, self.cpu_s + other.cpu_s)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Bound a block in this process, in its main thread.

        An allocation above the bound fails (MemoryError, or what a library makes of it). When the
        CPU time is used up, the process ends by :data:`OUT_OF_TIME`.
        """
        before = _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _data_bytes() + self.num_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        # whoever started the process may have it ignored
        signal.signal(OUT_OF_TIME, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, self.cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_DATA, before)


# a file may hold millions of empty chunks before its pixels
_OF_HEADERS = Allowance(64 << 20, 2.0)
# measured with 64 megapixels: PNG 6 at most, JPEG 12 (progressive CMYK), WebP 19, 2.4 s of CPU;
# with 16: AVIF 12, HEIC 13 (4:4:4 and transparency), deeper kinds up to 8 more, 2.5 s for HEIC
_BYTES_PER_PIXEL = {"WEBP": 20, "AVIF": 22, "HEIF": 26}
_BYTES_PER_OTHER_PIXEL = 14
_CPU_S_PER_PIXEL = {"HEIF": 0.6e-6}
_CPU_S_PER_OTHER_PIXEL = 0.25e-6


def of_decoding(data: bytes) -> Allowance:
    """Return what a file that a client sends may take to be decoded, by its header."""
    with _OF_HEADERS.enforced():
        header = header_of(data)
    num_bytes = header.num_pixels * _BYTES_PER_PIXEL.get(header.kind, _BYTES_PER_OTHER_PIXEL)
    return Allowance(
        _OF_HEADERS.num_bytes + 2 * len(data) + num_bytes,
        _OF_HEADERS.cpu_s
        + header.num_pixels * _CPU_S_PER_PIXEL.get(header.kind, _CPU_S_PER_OTHER_PIXEL),
    )


def _data_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[_DATA_FIELD])
    return pages * resource.getpagesize()
