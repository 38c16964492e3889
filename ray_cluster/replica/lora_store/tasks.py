"""What the child process does that turns files of LoRAs into files of factors."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ray_cluster.engine.adapters.factors import write_factors
from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.errors import ConfigError, InvalidRequest, ModelUnsupported
from ray_cluster.imaging.processes.worker_process import Message
from ray_cluster.protocol.loras import LoraFacts


@cache
def _give_way() -> None:
    """Leave the processor to denoising steps."""
    os.nice(10)


@cache
def _reader() -> LoraReader:
    """Return the one of this process."""
    return LoraReader()


def convert_task(job: Message) -> Message:
    """Do :func:`convert` in a child process, which gives way to denoising steps."""
    _give_way()
    return convert(job)


def convert(job: Message) -> Message:
    """Read a LoRA and write its factors.

    The job says ``file``, ``base_model``, ``target`` and the file's ``sha256``; the answer is what
    :class:`LoraFacts` holds.

    Raises:
        InvalidRequest: the file is none of a LoRA of this model.
        OSError: the model cannot be read, or the factors cannot be written.
    """
    header = job.header
    try:
        # its layers are the same, whatever it predicts
        base = resolve_folder(header["base_model"], prediction="epsilon")
        factors = _reader().read(Path(header["file"]), base)
    except ConfigError as error:
        # of this node, not of the file
        raise OSError(f"its base model cannot be read: {error}") from error
    except ModelUnsupported as error:
        raise InvalidRequest(str(error), "loras", "lora_failed") from error
    write_factors(factors, Path(header["target"]))
    facts = LoraFacts(
        sha256=header["sha256"],
        num_bytes=factors.num_bytes,
        ranks=factors.ranks,
        num_layers=factors.num_layers,
        changes_prompts=factors.changes_prompts,
    )
    return Message(asdict(facts))
