"""What one engine step costs beyond the plain UNet call that it makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.subject import Subject, bare_inputs, make_requests
from benchmarks.settings import GUIDANCE, Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import in_turns
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.deltas import LayerDeltas
from ray_cluster.engine.executor import Executor, Residuals, StepBatch
from ray_cluster.engine.state import Conditioning
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.policies.mixed_batching import mixed_batches
from ray_cluster.policies.step_policy import ReplicaSight, StepDecision

# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 500
_WARM_UP = 3


@dataclass(slots=True)
class Clocked:
    """Sums up the CPU seconds spent in what the engine was given."""

    policy_s: float = 0.0
    executor_s: float = 0.0


class ClockedExecutor:
    """An executor that notes its CPU time; two clock readings more per half."""

    def __init__(self, inner: Executor[Any, Any], clocked: Clocked) -> None:
        self._inner = inner
        self._clocked = clocked

    @property
    def device(self) -> torch.device:
        """See :class:`Executor`."""
        return self._inner.device

    @property
    def num_levels(self) -> int:
        """See :class:`Executor`."""
        return self._inner.num_levels

    def prepare(self, conditioning: Conditioning, deltas: LayerDeltas | None = None) -> Any:
        """See :class:`Executor`."""
        return self._inner.prepare(conditioning, deltas)

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """See :class:`Executor`."""
        return self._inner.latent_shape(width_px, height_px)

    def encode_half(self, batch: StepBatch[Any]) -> Any:
        """See :class:`Executor`."""
        started_s = time.thread_time()
        encoded = self._inner.encode_half(batch)
        self._clocked.executor_s += time.thread_time() - started_s
        return encoded

    def decode_half(self, encoded: Any, residuals: Residuals | None = None) -> Tensor:
        """See :class:`Executor`."""
        started_s = time.thread_time()
        output = self._inner.decode_half(encoded, residuals)
        self._clocked.executor_s += time.thread_time() - started_s
        return output


class OverheadBenchmark:
    """Compares engine steps with plain model calls of the same rows, in turns."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self._subject = subject
        self._settings = settings

    def run(self, report: Report) -> dict[str, Any]:
        """Measure every batch with guidance off and on."""
        cases = [
            (batch, guidance_scale)
            for guidance_scale in (1.0, GUIDANCE)
            for batch in self._settings.in_flight
        ]
        rows = []
        for index, (batch, guidance_scale) in enumerate(cases):
            report(index / len(cases), f"step of {batch}, guidance {guidance_scale}")
            rows.append(self._case(batch, guidance_scale))
        return {
            "what": "one engine step against a plain unet(x, t, embeds) call of the same rows "
            "(guidance rows included), same weights, 64 px, CPU time of the thread, in pairs; "
            "share = engine / plain - 1",
            "cases": rows,
        }

    @torch.inference_mode()
    def _case(self, batch: int, guidance_scale: float) -> dict[str, Any]:
        clocked = Clocked()
        engine = self._engine(clocked)
        states = self._subject.start(
            make_requests(batch, px=64, num_steps=_NUM_STEPS, guidance_scale=guidance_scale)
        )
        for state in states:
            engine.add(state)
        unet = self._subject.pipeline.unet
        inputs = bare_inputs(self._subject, states)

        def plain() -> None:
            unet(**inputs, return_dict=False)

        for _ in range(_WARM_UP):
            engine.step()
            plain()
        clocked.policy_s = clocked.executor_s = 0.0
        steps_s, plain_s = in_turns(engine.step, plain, self._settings.step_pairs)
        return _result(batch, guidance_scale, steps_s, plain_s, clocked)

    def _engine(self, clocked: Clocked) -> StepEngine:
        def policy(sight: ReplicaSight) -> StepDecision:
            started_s = time.thread_time()
            decision = mixed_batches(sight)
            clocked.policy_s += time.thread_time() - started_s
            return decision

        model = self._subject.model
        clocked_model = replace(model, executor=ClockedExecutor(model.executor, clocked))
        return build_engine(
            clocked_model,
            max_batch=max(self._settings.in_flight),
            clock=time.monotonic,
            policy=policy,
        )


def _result(
    batch: int,
    guidance_scale: float,
    steps_s: Sequence[float],
    plain_s: Sequence[float],
    clocked: Clocked,
) -> dict[str, Any]:
    ratio = paired_ratio(steps_s, plain_s)
    count = len(steps_s)
    step_s, executor_s, policy_s = sum(steps_s), clocked.executor_s, clocked.policy_s
    return {
        "batch": batch,
        "guidance": guidance_scale > 1,
        "step_s": summarise(steps_s).as_dict(),
        "plain_s": summarise(plain_s).as_dict(),
        "ratio": ratio.as_dict(),
        "share": ratio.median - 1,
        "mean_parts_s": {
            "plain model call": sum(plain_s) / count,
            "executor beyond it": (executor_s - sum(plain_s)) / count,
            "policy": policy_s / count,
            "rows, sampler and checks": (step_s - executor_s - policy_s) / count,
        },
    }
