"""What the child process does that fetches files of LoRAs. It imports no model library."""

from __future__ import annotations

from pathlib import Path

from ray_cluster.imaging.processes.worker_process import Message
from ray_cluster.models.sources.lora_sources import Bounds, fetch


def fetch_task(job: Message) -> Message:
    """Copy a source to a file; a task for a child process, which ends when that hangs.

    The job says ``source``, ``allowed``, ``target``, ``bounds`` and ``sha256`` (or nothing); the
    answer ``sha256``. Errors are those of :func:`fetch`.
    """
    header = job.header
    found = fetch(
        header["source"],
        header["allowed"],
        Path(header["target"]),
        Bounds(**header["bounds"]),
        sha256=header["sha256"],
    )
    return Message({"sha256": found})
