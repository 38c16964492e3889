"""What it costs to leave the states of rows in a store every few steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.aims import TELLING_INTERVAL
from benchmarks.engine.subject import Subject, make_requests
from benchmarks.settings import GUIDANCE, Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import Stopwatch
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.checkpoints import Checkpoints, ExportInterval
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.engine.tickets import LiveTickets, Ticket
from ray_cluster.policies.checkpointing import steps_between_exports
from ray_cluster.replica.state_writer import StateWriter
from ray_cluster.storage.blob_store import BlobStore

_TIMES_AS_OFTEN = 4
_BATCH = 8
# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 900
_WARM_UP = 64
_WAIT_S = 0.001


class ExportBenchmark:
    """Compares steps of two engines with the same rows, of which one exports, block by block.

    What the policy allows, 1 % of a step, is less than two blocks differ by chance. So exports are
    made more often as well, which shows what one costs, and what as many as the policy's would.
    """

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject = subject
        self._pairs = settings.step_pairs

    def run(self, report: Report) -> dict[str, Any]:
        """Measure at the interval that the policy chooses, and at shorter ones."""
        cases = []
        for index, guidance_scale in enumerate((1.0, GUIDANCE)):
            report(index / 2, f"exports, guidance {guidance_scale}")
            chosen, cost_s = self._choose(guidance_scale)
            rows = {
                "the policy's": chosen,
                TELLING_INTERVAL: max(1, round(chosen / _TIMES_AS_OFTEN)),
                "every step": 1,
            }
            cases += [
                {"guidance": guidance_scale > 1, "interval": name, "export_s": cost_s}
                | self._case(guidance_scale, num_steps, chosen)
                for name, num_steps in rows.items()
            ]
        return {
            "what": f"steps of {_BATCH} rows at 64 px with exports to a local folder against steps "
            "without, CPU time of the process (all threads), in pairs of blocks; "
            "share = with / without - 1, share_at_policy = share * num_steps / the policy's",
            "cases": cases,
        }

    def _choose(self, guidance_scale: float) -> tuple[int, float]:
        """Let the policy settle; return its interval, and the seconds of an export beside steps."""
        with self._exporting(guidance_scale, steps_between_exports) as (engine, exports, writer):
            for _ in range(_WARM_UP):
                exports.after_step(engine.step())
            return exports.num_steps or 1, writer.cost_s or 0.0

    def _case(self, guidance_scale: float, num_steps: int, chosen: int) -> dict[str, Any]:
        plain = self._engine(guidance_scale, LiveTickets())
        block = max(num_steps, 4)
        pairs = min(2 * self._pairs, _NUM_STEPS // block - 3)
        samples: tuple[list[float], list[float]] = ([], [])

        with self._exporting(guidance_scale, lambda *_: num_steps) as (engine, exports, writer):

            def step_with_exports() -> None:
                for _ in range(block):
                    exports.after_step(engine.step())
                while any(writer.is_busy(str(index)) for index in range(_BATCH)):
                    time.sleep(_WAIT_S)

            def step_without() -> None:
                for _ in range(block):
                    plain.step()

            step_with_exports()
            step_without()
            turns = [(step_with_exports, samples[0]), (step_without, samples[1])]
            for turn in range(pairs):
                for call, cpu_s in turns if turn % 2 == 0 else turns[::-1]:
                    with Stopwatch() as watch:
                        call()
                    cpu_s.append(watch.cost.process_s / block)
        ratio = paired_ratio(*samples)
        return {
            "num_steps": num_steps,
            "with_s": summarise(samples[0]).as_dict(),
            "without_s": summarise(samples[1]).as_dict(),
            "ratio": ratio.as_dict(),
            "share": ratio.median - 1,
            "share_at_policy": [
                (value - 1) * num_steps / chosen
                for value in (ratio.median, ratio.ci_low, ratio.ci_high)
            ],
        }

    @contextmanager
    def _exporting(
        self, guidance_scale: float, interval: ExportInterval
    ) -> Iterator[tuple[StepEngine, Checkpoints, StateWriter]]:
        live = LiveTickets()
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            engine = self._engine(guidance_scale, live)
            writer = StateWriter(BlobStore(folder))
            writer.start()
            exports = Checkpoints(engine, live, writer, time.monotonic, interval)
            # the first step has the cost of an export measured
            exports.after_step(engine.step())
            while writer.cost_s is None:
                time.sleep(_WAIT_S)
            yield engine, exports, writer
            writer.stop()

    @torch.inference_mode()
    def _engine(self, guidance_scale: float, live: LiveTickets) -> StepEngine:
        engine = build_engine(self._subject.model, max_batch=_BATCH, clock=time.monotonic)
        requests = make_requests(_BATCH, px=64, num_steps=_NUM_STEPS, guidance_scale=guidance_scale)
        for state in self._subject.start(requests):
            engine.add(state)
            live.enter(Ticket(state.request, 0.0, 0.0, 0.0, 0.0, state))
        return engine
