"""A rank whose steps last as long as it is told, where they are not longer anyway.

It writes a line per step: when it began, how long it is to last, and how long it took by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torch import Tensor

from benchmarks.groups.published import StepTimes
from ray_cluster.engine.dit.executor import PreparedPrompt
from ray_cluster.engine.groups.ranks import GuidanceRows
from ray_cluster.engine.groups.sharded import ShardedDiT
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.protocol.groups import GROUP_START
from ray_cluster.replica.group.rank import run_rank

TERMS, FOLDER, PIXELS = "RAY_CLUSTER_PACE", "RAY_CLUSTER_PACE_FOLDER", "RAY_CLUSTER_PACE_PIXELS"
"""Environment: the terms of each degree's step, where lines go, pixels per latent pixel."""


def main() -> None:
    """Run the rank that standard input says the start of."""
    terms = {int(k): tuple(v) for k, v in json.loads(os.environ[TERMS]).items()}
    times, factor = StepTimes(terms, {}), float(os.environ[PIXELS])
    path, predict = Path(os.environ[FOLDER]) / str(os.getpid()), ShardedDiT.predict
    with path.open("w", buffering=1, encoding="utf-8") as lines:

        def paced(
            self: ShardedDiT,
            batch: StepBatch[PreparedPrompt],
            ranks: range,
            rows: GuidanceRows = "together",
        ) -> Tensor | None:
            began_s = time.monotonic()
            found = predict(self, batch, ranks, rows)
            took_s = time.monotonic() - began_s
            lasts_s = times.step_s(len(ranks), factor * batch.latents.shape[0])
            lines.write(f"{began_s:020.5f} {lasts_s:.5f} {took_s:.5f}\n")
            time.sleep(max(0.0, lasts_s - took_s))
            return found

        ShardedDiT.predict = paced  # type: ignore[method-assign]
        run_rank(GROUP_START.decode(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
