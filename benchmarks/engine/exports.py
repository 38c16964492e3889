"""What it costs to export the states of rows to a store every few steps.

At the interval that the policy chooses an export costs less than two blocks of steps differ by
chance. So states are exported four times as often, and after every step, and the cost at the
policy's interval is computed from that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.figures import Figure, paired_ratio, scaled
from benchmarks.harness import SCALES, Study, in_turns
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.tickets import LiveTickets, Ticket
from ray_cluster.engine.step.checkpoints import Checkpoints, ExportInterval
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.steps.checkpointing import steps_between_exports
from ray_cluster.replica.states.writer import StateWriter
from ray_cluster.storage.blob_store import BlobStore

_BATCH = 8
_AIM_PERCENT = 1.0
# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 900
_WARM_UP = 64
_WAIT_S = 0.001


def measure(study: Study) -> None:
    """Measure at the interval that the policy chooses, and at shorter ones."""
    study.found["what"] = (
        f"steps of {_BATCH} rows at 64 px with exports to a local folder over steps without, CPU "
        "time of all threads, blocks in turns"
    )
    subject = load_subject()
    for scale in study.each(SCALES):
        # the interval that the policy settles at
        with _exporting(subject, scale, steps_between_exports) as (engine, exports, writer):
            for _ in range(_WARM_UP):
                exports.after_step(engine.step())
            chosen, export_s = exports.num_steps or 1, writer.cost_s or 0.0
        often = max(1, round(chosen / 4))
        for interval in dict.fromkeys((chosen, often, 1)):
            found = _with_over_without(subject, scale, interval, study.pick(80, 8))
            at_policy = scaled(found, 100 * interval / chosen, less=1)
            study.row(
                "exports",
                guidance=scale > 1,
                every_n_steps=interval,
                policy_chooses=chosen,
                export_ms=1e3 * export_s,
                with_over_without=found,
                percent_at_policy=at_policy,
            )
            if interval == often:
                name = f"exported states, batch {_BATCH}, guidance {'on' if scale > 1 else 'off'}"
                study.at_most(name, _AIM_PERCENT, at_policy, "%")


def _with_over_without(subject: Subject, scale: float, interval: int, rounds: int) -> Figure:
    plain = _engine(subject, scale, LiveTickets())
    block = max(interval, 4)
    with _exporting(subject, scale, lambda *_: interval) as (engine, exports, writer):

        def step_with_exports() -> None:
            for _ in range(block):
                exports.after_step(engine.step())
            while any(writer.is_busy(str(index)) for index in range(_BATCH)):
                time.sleep(_WAIT_S)

        def step_without() -> None:
            for _ in range(block):
                plain.step()

        ways = {"with": step_with_exports, "without": step_without}
        in_turns(ways, 1)
        costs = in_turns(ways, min(rounds, _NUM_STEPS // block - 3))
    return paired_ratio(*([one.process_s for one in costs[name]] for name in ways))


@contextmanager
def _exporting(
    subject: Subject, scale: float, interval: ExportInterval
) -> Iterator[tuple[StepEngine, Checkpoints, StateWriter]]:
    live = LiveTickets()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        engine = _engine(subject, scale, live)
        writer = StateWriter(BlobStore(folder))
        writer.start()
        exports = Checkpoints(engine, live, writer, time.monotonic, interval, lambda: None)
        # the first step has the cost of an export measured
        exports.after_step(engine.step())
        while writer.cost_s is None:
            time.sleep(_WAIT_S)
        yield engine, exports, writer
        writer.stop()


@torch.inference_mode()
def _engine(subject: Subject, scale: float, live: LiveTickets) -> StepEngine:
    engine = build_engine(subject.model, max_batch=_BATCH, clock=time.monotonic)
    requests = make_requests(_BATCH, px=64, num_steps=_NUM_STEPS, guidance_scale=scale)
    for state in subject.start(requests):
        engine.add(state)
        live.enter(Ticket(state.request, 0.0, 0.0, 0.0, 0.0, state=state))
    return engine
