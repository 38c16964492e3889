"""LoRA files and orders for tests of a node's folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.imaging.processes.worker_process import CoderProcess, Message
from ray_cluster.models.builtin import weights_folder
from ray_cluster.protocol.loras import Lora, LoraOrder
from ray_cluster.replica.lora_store.folder import LoraFolder
from ray_cluster.replica.lora_store.processes import LoraProcesses

PASTEL = weights_folder() / "pastel" / "pytorch_lora_weights.safetensors"


def order(lora_id: str, source: str | Path = "builtin:pastel", **changes: Any) -> LoraOrder:
    of_order = {key: changes.pop(key) for key in ("attempt", "is_needed") if key in changes}
    base_model = changes.pop("base_model", "shapes-sd")
    lora = Lora(lora_id, f"name-{lora_id}", "shapes-sd", str(source), **changes)
    return LoraOrder(lora, base_model, **of_order)


def arguments(root: Path, **changes: Any) -> LorasConfig:
    """Return where tests keep factors, and the folder ``files`` as a source beside built-ins."""
    (root / "files").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "folder": str(root / "loras"),
        "sources": ("builtin:", str(root / "files")),
        "fetch_timeout_s": 60.0,
    }
    return LorasConfig(**{**values, **changes})


class Converter:
    """A process that converts, lent to folders: the imports of a new one take seconds."""

    def __init__(self) -> None:
        self._process: CoderProcess | None = None

    @property
    def pids(self) -> set[int]:
        """Ids of what is not lent."""
        return set() if self._process is None else {self._process.pid}

    def lend(self, processes: LoraProcesses) -> None:
        processes._converter, self._process = self._process, None

    def take_back(self, processes: LoraProcesses) -> None:
        # none if it was killed, or not needed yet
        self._process, processes._converter = processes._converter, None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


@asynccontextmanager
async def opened(
    given: LorasConfig, converter: Converter | None = None
) -> AsyncIterator[LoraFolder]:
    """Open a folder; without a converter it starts its own when it needs one."""
    folder = LoraFolder(given)
    folder.prepare()
    if converter is not None:
        converter.lend(folder._processes)
    try:
        yield folder
    finally:
        if converter is not None:
            converter.take_back(folder._processes)
        await asyncio.to_thread(folder.close)


def parts(given: LorasConfig) -> list[str]:
    """Return the names of what is half done."""
    return sorted(one.name for one in (Path(given.folder) / "parts").iterdir())


def write_variant(path: Path, seed: int) -> Path:
    """Write a LoRA like ``pastel`` with factors of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(one.shape, generator=generator) for name, one in load_file(PASTEL).items()
    }
    save_file(tensors, path)
    return path


def write_half(job: Message) -> Message:
    """Die over a file beside the target, as a process that converts; a task for one."""
    target = Path(job.header["target"])
    target.with_suffix(".0001.part").write_bytes(b"half")
    (target.parent.parent / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return job
