"""Jobs that take more than they may; run in a coder process."""

from __future__ import annotations

import numpy as np

from ray_cluster.imaging.processes.allowance import Allowance
from ray_cluster.imaging.processes.worker_process import Message

MIB = 1 << 20


def greedy_task(job: Message) -> Message:
    """Use so many MiB, or CPU time without end, of an allowance in MiB and seconds."""
    allowed = Allowance(job.header["max_mib"] * MIB, job.header["max_s"])
    with allowed.enforced():
        if "mib" not in job.header:
            while True:
                pass
        size = np.ones(job.header["mib"] * MIB, np.uint8).size
    return Message({"size": size})
