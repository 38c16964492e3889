"""Who may own a job store: a dispatcher of a cell, as a process of a machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Holder:
    """A dispatcher.

    Attributes:
        cell: the same for all dispatchers of a cell, of which the last one started is right.
        process: pid and start of its process; empty where that is not known.
        space: where pids like that are unique: one boot of one machine or container.
        place: for people.
    """

    cell: str
    process: str
    space: str
    place: str

    @classmethod
    def here(cls, cell: str) -> Self:
        """Return this process as a dispatcher of a cell."""
        pid, place = os.getpid(), f"process {os.getpid()} on {socket.gethostname()}"
        try:
            return cls(cell, _process(pid), _space(), place)
        except OSError:
            return cls(cell, "", "", place)

    @property
    def is_dead(self) -> bool:
        """Whether its process has certainly ended: it was one of this machine's."""
        if not self.process or not self.space or self.space != _space():
            return False
        try:
            return _process(int(self.process.partition(" ")[0])) != self.process
        except OSError:
            # others' processes are not to be seen here
            return False


def _process(pid: int) -> str:
    """Return a pid with the instant of its start, as pids come again; empty without a process.

    Raises:
        OSError: it cannot be known.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # with hidepid, others' processes are hidden likewise: then the first one is, too
        Path("/proc/1/stat").read_text()
        return ""
    # the name, in parentheses, may hold anything
    fields = text.rpartition(")")[2].split()
    # of a zombie, nothing is left but its parent's interest
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
