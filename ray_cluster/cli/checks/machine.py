"""Memory, disks, temporary folders, limits and the clock of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import ray_cluster
from ray_cluster.cli.checks.finding import Finding, ok, problem, warning
from ray_cluster.config.sections import RayConfig

_GIB = 2**30
_MIB = 2**20
# below the first nothing starts, below the second logs and spilled objects may fill it
_LEAST_TEMP_BYTES = 200 * _MIB
_ENOUGH_TEMP_BYTES = 5 * _GIB
_LEAST_FREE_MEMORY_BYTES = 2 * _GIB
_LEAST_FILES = 4096
# what the longest socket path adds to Ray's folder, and what Linux allows for the whole
_SOCKET_TAIL = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"
_MAX_SOCKET_BYTES = 107
_DAY_S = 86400.0


def check_machine(ray: RayConfig) -> Iterator[Finding]:
    """Yield what there is to say of the machine; of Ray's needs only where Ray starts here."""
    yield _memory()
    folder = Path(ray.temp_dir) if ray.temp_dir else Path(tempfile.gettempdir()) / "ray"
    if ray.address is None:
        yield _temp_folder(folder)
        yield _socket_paths(folder)
        yield _shared_memory(ray)
        if ray.auth == "token":
            yield _token_folder(Path.home() / ".ray")
    yield _open_files()
    yield _clock()


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < _LEAST_FREE_MEMORY_BYTES:
        return warning("memory", found, "Ray alone takes about 1 GiB; end other programs")
    return ok("memory", found)


def _temp_folder(folder: Path) -> Finding:
    existing = nearest_existing(folder)
    if not is_writable(existing):
        return problem(
            "temporary folder",
            f"{existing} cannot be written to",
            "set ray.temp_dir to a folder of your own with a short name",
        )
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _LEAST_TEMP_BYTES:
        return problem("temporary folder", found, "free space there, or set ray.temp_dir")
    if free < _ENOUGH_TEMP_BYTES:
        return warning("temporary folder", found, "logs and spilled objects may fill it")
    return ok("temporary folder", found)


def _socket_paths(folder: Path) -> Finding:
    length = len((str(folder.absolute()) + _SOCKET_TAIL).encode())
    if length <= _MAX_SOCKET_BYTES:
        return ok("socket paths", f"{length} of {_MAX_SOCKET_BYTES} bytes")
    most = _MAX_SOCKET_BYTES - len(_SOCKET_TAIL)
    return problem(
        "socket paths",
        f"{length} bytes below {folder}; the system allows {_MAX_SOCKET_BYTES}",
        f"set ray.temp_dir to a path of at most {most} characters, such as /tmp/ray",
    )


def _shared_memory(ray: RayConfig) -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return warning("/dev/shm", "not there", "Ray's object store will be on disk, and slow")
    free = shutil.disk_usage(folder).free
    found = f"{free // _MIB} MiB free, the object store takes {ray.object_store_mib} MiB"
    if free < ray.object_store_mib * _MIB:
        return warning(
            "/dev/shm",
            found,
            "the store will be on disk, and slow: lower ray.object_store_mib, or in Docker give "
            "--shm-size",
        )
    return ok("/dev/shm", found)


def _token_folder(folder: Path) -> Finding:
    if is_writable(nearest_existing(folder)):
        return ok("Ray's token", f"kept in {folder}")
    return problem(
        "Ray's token",
        f"{folder} cannot be written to",
        "make the home folder writable, or set ray.auth to 'disabled' where no stranger reaches "
        "this machine",
    )


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        return warning("open files", f"at most {soft}", f"ulimit -n {_LEAST_FILES}")
    return ok("open files", f"at most {soft}")


def _clock() -> Finding:
    """A clock that is older than this program would break TLS and file times."""
    installed_s = Path(ray_cluster.__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if time.time() < installed_s - _DAY_S:
        return warning("clock", f"{now}, older than this program", "set the clock")
    return ok("clock", now)


def nearest_existing(folder: Path) -> Path:
    """Return the folder or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def is_writable(folder: Path) -> bool:
    """Whether this user may make files in an existing folder."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
