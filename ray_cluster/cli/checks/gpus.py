"""The GPUs, and whether they suit the pools that want some."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence

from ray_cluster.cli.checks.finding import Finding, ok, problem, warning
from ray_cluster.config.pools import PoolConfig

_GIB = 2**30


def check_gpus(pools: Sequence[PoolConfig]) -> Iterator[Finding]:
    """Yield the GPUs of this machine and what the pools miss."""
    try:
        import torch
    except (ImportError, OSError):
        # said elsewhere
        return
    driver = _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        yield ok(
            f"GPU {index}",
            f"{torch.cuda.get_device_name(index)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB "
            f"free, driver {driver or 'unknown'}",
        )
    if count == 0:
        yield _none_usable(driver, torch.version.cuda)
    wanted = sum(pool.num_gpus * pool.replicas for pool in pools)
    if wanted > count:
        names = ", ".join(pool.name for pool in pools if pool.num_gpus)
        yield problem(
            "GPUs for the pools",
            f"{names} want {wanted:g} GPU(s), {count} can be used",
            "lower replicas or num_gpus, or set device: cpu and num_gpus: 0",
        )


def _none_usable(driver: str | None, cuda: str | None) -> Finding:
    if driver is None:
        return ok("GPU", "none; models run on the CPU")
    if cuda is None:
        return warning(
            "GPU",
            f"driver {driver}, but torch is a CPU build",
            "install a CUDA build of torch to use the GPU",
        )
    return warning(
        "GPU",
        f"driver {driver}, but torch with CUDA {cuda} cannot use it",
        "update the driver, or install a torch for an older CUDA",
    )


def _driver() -> str | None:
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
