"""Runs requests through diffusers one by one, and through the engine in any company."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.files.known_activations import KnownActivations
from ray_cluster.engine.models.loading import LoadedModel, load_model
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.engine.step.step_engine import FailedRow, StepEngine
from ray_cluster.policies.types import RowView
from ray_cluster.requests import ImageRequest

# docs/engine.md, Exactness
CALL_TOLERANCE = 2e-5
RUN_TOLERANCE = 1e-4
PIXEL_TOLERANCE = 1
CONTROL_FACTOR = 100

TAKES_NOISE = ("euler_ancestral", "lcm")


def request(request_id: str = "a", **changes: Any) -> ImageRequest:
    """A request of 6 steps for 64 x 64 pixels with guidance, unless told otherwise."""
    values: dict[str, Any] = {
        "model": "m",
        "prompt": "a small red circle",
        "width_px": 64,
        "height_px": 64,
        "num_steps": 6,
        "guidance_scale": 3.0,
        "sampler": "ddim",
        "seed": 1,
    }
    return ImageRequest(request_id=request_id, **(values | changes))


def pool(folder: Path | str, **changes: Any) -> PoolConfig:
    return PoolConfig(name="m", model=str(folder), **({"max_px": 128} | changes))


def load(given: PoolConfig) -> LoadedModel:
    """Load a model whose memory is none of the test's: counting activations takes seconds."""
    with patch.object(KnownActivations, "found", _assumed):
        return load_model(given)


def _assumed(_self: KnownActivations, what: str, *_more: Any) -> int:
    rows = re.match(r"step of (\d+)", what)
    return (1 << 20) * (int(rows[1]) if rows else 1)


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite if either holds NaN."""
    gap = float((one.float() - other.float()).abs().max())
    return float("inf") if math.isnan(gap) else gap


def start(model: LoadedModel, one: ImageRequest, **changes: Any) -> RequestState:
    """Encode a request alone and return its state before the first step."""
    return start_all(model, [one], **changes)[0]


def start_all(
    model: LoadedModel, requests: Sequence[ImageRequest], **changes: Any
) -> list[RequestState]:
    with torch.inference_mode():
        states = [
            RequestState.start(
                one,
                conditioning,
                latent_shape=model.executor.latent_shape(one.width_px, one.height_px),
                table=model.tables.of(one),
                arrival_s=0.0,
                deadline_s=1e9,
            )
            for one, conditioning in zip(requests, model.encoder.encode(requests), strict=True)
        ]
    return [replace(state, **changes) for state in states]


def call_model(
    executor: Any,
    latents: Sequence[Tensor],
    timesteps: Tensor,
    conditionings: Sequence[Conditioning],
    guidance_scales: Sequence[float],
    deltas: Sequence[LayerDeltas | None] = (),
) -> list[Tensor]:
    """One model call over images ``[C, h, w]`` of any sizes; what it predicts for each."""
    owned = list(deltas) or [None] * len(latents)
    sizes = [
        (*image.shape[1:], conditioning.is_guided)
        for image, conditioning in zip(latents, conditionings, strict=True)
    ]
    composition, order = composition_of(sizes)
    layout = layout_of(composition, executor.num_levels)
    with torch.inference_mode():
        batch = StepBatch(
            layout,
            torch.cat([latents[index].permute(1, 2, 0).flatten(0, 1) for index in order]),
            timesteps[list(order)],
            tuple(executor.prepare(conditionings[index], owned[index]) for index in order),
            torch.tensor([guidance_scales[index] for index in order]),
            deltas=tuple(owned[index] for index in order) if any(owned) else (),
        )
        output = executor.decode_half(executor.encode_half(batch))
    parts = dict(zip(order, output.split(layout.request_tokens), strict=True))
    return [
        parts[index].unflatten(0, image.shape[1:]).permute(2, 0, 1)
        for index, image in enumerate(latents)
    ]


def all_rows(rows: Sequence[RowView], now_s: float) -> list[str]:
    """Step every row, whatever its size."""
    return [row.request.request_id for row in rows]


def engine_of(model: LoadedModel, policy: Any = all_rows, executor: Any = None) -> StepEngine:
    return StepEngine(executor or model.executor, policy, model.tables, time.monotonic)


@dataclass(slots=True)
class EngineRun:
    """What came out of an engine, by request id."""

    finished: dict[str, RequestState] = field(default_factory=dict)
    failed: dict[str, FailedRow] = field(default_factory=dict)
    batch_sizes: list[int] = field(default_factory=list)

    def latents(self, request_id: str) -> Tensor:
        return self.finished[request_id].latents


def drive(
    engine: StepEngine,
    joining: Mapping[int, Sequence[RequestState]],
    leaving: Mapping[int, Sequence[str]] | None = None,
    until: Callable[[StepEngine], bool] = lambda engine: len(engine) == 0,
) -> EngineRun:
    """Step until all is done; rows join and are aborted before the step of that number."""
    run, index = EngineRun(), 0
    with torch.inference_mode():
        while index <= max(joining) or not until(engine):
            for state in joining.get(index, ()):
                engine.add(state)
            for request_id in (leaving or {}).get(index, ()):
                engine.abort(request_id)
            report = engine.step()
            run.batch_sizes.append(len(report.stepped))
            run.finished |= {state.request.request_id: state for state in report.finished}
            run.failed |= {row.state.request.request_id: row for row in report.failed}
            index += 1
    return run


def run_together(model: LoadedModel, requests: Sequence[ImageRequest]) -> dict[str, Tensor]:
    """Return the final latents of requests that all start at once."""
    run = drive(engine_of(model), {0: start_all(model, requests)})
    assert not run.failed
    return {request_id: state.latents for request_id, state in run.finished.items()}


def run_alone(model: LoadedModel, one: ImageRequest) -> Tensor:
    return run_together(model, [one])[one.request_id]


def pixel_difference(one: Any, other: Any) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def taken(engine: StepEngine, request_id: str) -> RequestState:
    """Take a request out of an engine."""
    state = engine.copy_state(request_id)
    engine.abort(request_id)
    return state
