"""LoRA files and orders for tests of a node's folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ray_cluster.config.loras import LoraArguments
from ray_cluster.imaging.worker_process import Message
from ray_cluster.models.builtin import weights_folder
from ray_cluster.protocol.loras import Lora, LoraOrder

PASTEL = weights_folder() / "pastel" / "pytorch_lora_weights.safetensors"


def order(lora_id: str, source: str | Path = "builtin:pastel", **changes: Any) -> LoraOrder:
    of_order = {key: changes.pop(key) for key in ("attempt", "is_needed") if key in changes}
    base_model = changes.pop("base_model", "shapes-sd")
    lora = Lora(lora_id, f"name-{lora_id}", "shapes-sd", str(source), **changes)
    return LoraOrder(lora, base_model, **of_order)


def arguments(root: Path, **changes: Any) -> LoraArguments:
    """Return where tests keep factors, and the folder ``files`` as a source beside built-ins."""
    (root / "files").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "folder": str(root / "loras"),
        "sources": ("builtin:", str(root / "files")),
        "fetch_timeout_s": 60.0,
    }
    return LoraArguments(**{**values, **changes})


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
