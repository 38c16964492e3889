"""What ``doctor`` finds of memory, disks, limits, clock, processor, GPUs and the model cache."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

import ray_cluster
from ray_cluster.cli.checks import Finding, ok, problem, warning
from ray_cluster.cli.service.ray_messages import busy_words
from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.policies.costs.gpu_shares import Card
from ray_cluster.process.machine import cpu_model

_GIB = 2**30
_MIB = 2**20
# below the first nothing starts, below the second logs and spilled objects may fill it
_MIN_TEMP_BYTES = 200 * _MIB
_ENOUGH_TEMP_BYTES = 5 * _GIB
_MIN_FREE_MEMORY_BYTES = 2 * _GIB
_MIN_OPEN_FILES = 4096
# what the longest socket path adds to Ray's folder, and what Linux allows for the whole
_SOCKET_TAIL = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"
_MAX_SOCKET_BYTES = 107
_DAY_S = 86400.0
# SDXL in half precision takes 7 GB
_ENOUGH_CACHE_BYTES = 10 * _GIB


def check_machine(ray: RayConfig) -> Iterator[Finding]:
    """Yield findings about the machine; about Ray's needs only where Ray starts here."""
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < _MIN_FREE_MEMORY_BYTES:
        yield warning("memory", found, "Ray alone takes about 1 GiB; end other programs")
    else:
        yield ok("memory", found)
    if ray.address is None:
        folder = Path(ray.temp_dir) if ray.temp_dir else Path(tempfile.gettempdir()) / "ray"
        yield _temp_folder(folder)
        yield _socket_paths(folder)
        yield _shared_memory(ray)
        if ray.auth == "token":
            yield _token_folder(Path.home() / ".ray")
        if busy := busy_words():
            advice = "Ray may start late, or not: end other programs, or wait"
            yield warning("load", busy.removeprefix("on "), advice)
        else:
            yield ok("load", f"{os.getloadavg()[0]:.1f} on {psutil.cpu_count()} CPUs")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        yield warning("open files", f"at most {soft}", f"ulimit -n {_MIN_OPEN_FILES}")
    else:
        yield ok("open files", f"at most {soft}")
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    # such a clock breaks TLS and the times of files
    if time.time() < Path(ray_cluster.__file__).stat().st_mtime - _DAY_S:
        yield warning("clock", f"{now}, older than this program", "set the clock")
    else:
        yield ok("clock", now)


def _temp_folder(folder: Path) -> Finding:
    existing = _nearest_existing(folder)
    if not _is_writable(existing):
        return problem(
            "temporary folder",
            f"{existing} cannot be written to",
            "set ray.temp_dir to a folder of your own with a short name",
        )
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _MIN_TEMP_BYTES:
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
    if _is_writable(_nearest_existing(folder)):
        return ok("Ray's token", f"kept in {folder}")
    return problem(
        "Ray's token",
        f"{folder} cannot be written to",
        "make the home folder writable, or set ray.auth to 'disabled' where no stranger reaches "
        "this machine",
    )


def check_model_cache() -> Iterator[Finding]:
    """Yield a finding about Hugging Face's cache of downloaded models."""
    from huggingface_hub import constants

    folder = _nearest_existing(Path(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(folder).free
    mode = "offline" if constants.HF_HUB_OFFLINE else "downloads allowed"
    found = f"{constants.HF_HUB_CACHE}, {free / _GIB:.1f} GiB free, {mode}"
    if not _is_writable(folder):
        yield warning(
            "model cache", f"{found}, not writable", "set HF_HOME to a folder of your own"
        )
    elif free < _ENOUGH_CACHE_BYTES:
        yield warning("model cache", found, "large models will not fit; set HF_HOME elsewhere")
    else:
        yield ok("model cache", found)


def check_processor(pools: Sequence[PoolConfig]) -> Iterator[Finding]:
    """Yield findings about the processor, and about the number formats of pools on it."""
    try:
        import torch
    except (ImportError, OSError):
        # reported by another check
        return
    from ray_cluster.engine.models.wide_layers import has_instructions

    found = f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"
    formats = {pool.name: pool.number_format() for pool in pools if pool.device == "cpu"}
    slow = sorted(
        {one for one in formats.values() if one and not has_instructions(getattr(torch, one))}
    )
    if not slow:
        yield ok("processor", found)
    for dtype in slow:
        names = ", ".join(name for name, one in formats.items() if one == dtype)
        yield warning(
            "processor",
            f"{found}: no instructions for {dtype} (pool {names})",
            f"layers widen their weights and compute in float32: {dtype} saves memory and no time; "
            "set dtype: float32 where memory allows it",
        )


def check_gpus(pools: Sequence[PoolConfig], card: Card | None = None) -> Iterator[Finding]:
    """Yield the GPUs of this machine and what the pools miss.

    Args:
        card: the kind of GPU that they are to run on elsewhere.
    """
    try:
        import torch
    except (ImportError, OSError):
        # reported by another check
        return
    driver = _gpu_driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        yield ok(
            f"GPU {index}",
            f"{torch.cuda.get_device_name(index)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB "
            f"free, driver {driver or 'unknown'}",
        )
    if count == 0 and driver is None:
        yield ok("GPU", "none; models run on the CPU")
    elif count == 0 and torch.version.cuda is None:
        yield warning(
            "GPU",
            f"driver {driver}, but torch is a CPU build",
            "install a CUDA build of torch to use the GPU",
        )
    elif count == 0:
        yield warning(
            "GPU",
            f"driver {driver}, but torch with CUDA {torch.version.cuda} cannot use it",
            "update the driver, or install a torch for an older CUDA",
        )
    wanted = sum(pool.reserved_gpus * pool.replicas for pool in pools)
    if wanted > count and card is None:
        names = ", ".join(pool.name for pool in pools if pool.num_gpus)
        yield problem(
            "GPUs for the pools",
            f"{names} want {wanted:g} GPU(s), {count} can be used",
            "lower replicas, ranks or num_gpus, or set device: cpu and num_gpus: 0",
        )


def first_card(pools: Sequence[PoolConfig]) -> Card | None:
    """Return the first GPU of this machine, if a pool runs on one and there is any."""
    try:
        import torch
    except (ImportError, OSError):
        # reported by another check
        return None
    if not torch.cuda.is_available() or all(pool.device == "cpu" for pool in pools):
        return None
    from ray_cluster.engine.device.gpu import this_card

    return this_card()


def _gpu_driver() -> str | None:
    """Return the version of NVIDIA's driver, if there is one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def _nearest_existing(folder: Path) -> Path:
    """Return the folder or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
