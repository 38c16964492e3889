"""The inputs of a step: the rows that an engine has, and those of one model call."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.batch.token_layout import TokenLayout
from ray_cluster.engine.device.streams import sent
from ray_cluster.engine.schedules.sampler_schedules import SamplerTable
from ray_cluster.engine.step.executor import Executor, RowReuse, StepBatch
from ray_cluster.engine.step.rings import part_of
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.kernels.sampler_update.reference import NUM_COEFFICIENTS


@dataclass(frozen=True, slots=True)
class LateLoras:
    """What a request has after its first steps.

    Attributes:
        deltas: what its LoRAs add to the outputs of layers; None if they change prompts alone.
        conditioning: its prompts with them; None if they leave the text encoders as they are.
    """

    deltas: LayerDeltas | None
    conditioning: Conditioning | None = None


@dataclass(slots=True)
class Held:
    """A request that an engine has.

    Attributes:
        table: the schedule of its sampler.
        last_step: number of the engine's step that it was last part of, or after which it came.
        deltas: what it adds to the outputs of layers.
        prepared: what the executor made of its conditioning, from its first step here on.
        late: what it will have after its first steps; None while that is not there, and for others.
        is_merged: whether the model's weights have these deltas in them now.
    """

    state: RequestState
    table: SamplerTable
    last_step: int
    deltas: LayerDeltas | None = None
    prepared: Any = None
    late: LateLoras | None = None
    is_merged: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether it has what its next step takes: not while its LoRAs are due and not there."""
        return self.late is not None or not self._needs_loras

    @property
    def _needs_loras(self) -> bool:
        start = self.state.request.add_ons.lora_start_step
        return self.state.lacks_loras and self.state.step_index >= start

    def begin_step(self) -> None:
        """Take on its LoRAs if they are due, and are there."""
        if self.late is None or not self._needs_loras:
            return
        if self.late.conditioning is not None:
            seen = self.state.conditioning.references
            self.state.conditioning = replace(self.late.conditioning, references=seen)
        self.state.lacks_loras = False
        self.deltas, self.prepared, self.late = self.late.deltas, None, None

    @property
    def is_done(self) -> bool:
        """Whether it has taken its last step; a state imported like that is not to step."""
        return self.state.step_index >= self.table.num_calls

    @property
    def active_controlnets(self) -> tuple[str, ...]:
        """The ControlNets that do something in its next step."""
        step, num_calls = self.state.step_index, self.table.num_calls
        uses = self.state.request.add_ons.controls
        return tuple(use.name for use in uses if use.is_active(step, num_calls))

    @property
    def draws_noise(self) -> bool:
        """Whether its next step draws from the request's generator."""
        return self.table.takes_noise[self.state.step_index]


@dataclass(frozen=True, slots=True)
class Start:
    """What one row's model call begins with.

    Attributes:
        latents: ``[C, h, w]`` in the sampler's own scale.
        step_index: of the step whose timestep it is.
        reuse: the row's part in reuse.
    """

    row: Held
    latents: Tensor
    step_index: int
    reuse: RowReuse | None


class Call:
    """The inputs of a model call over rows in the order of their layout.

    Attributes:
        executor: the model.
        rows: whose call it is.
        latents: ``[M, C]`` in the samplers' own scales.
        coefficients: ``[B, 8]`` of the samplers' updates.
        batch: what the executor takes.
    """

    def __init__(
        self, starts: Sequence[Start], layout: TokenLayout, executor: Executor[Any, Any]
    ) -> None:
        packed = torch.stack([start.row.table.packed[start.step_index] for start in starts])
        scales = torch.tensor([[start.row.state.request.guidance_scale] for start in starts])
        timesteps, input_scale, self.coefficients, scales = sent(
            torch.cat([packed, scales], dim=1), executor.device
        ).split([1, 1, NUM_COEFFICIENTS, 1], dim=1)
        self.executor = executor
        self.rows = [start.row for start in starts]
        self.latents = flat_pixels([start.latents for start in starts])
        parts = tuple(start.reuse for start in starts)
        deltas = tuple(None if row.is_merged else row.deltas for row in self.rows)
        owner = layout.request_of_token(executor.device)
        inputs = self.latents * input_scale.index_select(0, owner)
        if executor.num_conditions:
            inputs = torch.cat([inputs, _conditions(starts, executor)], dim=1)
        self.batch: StepBatch[Any] = StepBatch(
            layout=layout,
            latents=inputs,
            timesteps=timesteps[:, 0],
            prepared=tuple(start.row.prepared for start in starts),
            guidance_scales=scales[:, 0],
            reuse=parts if any(part is not None for part in parts) else (),
            deltas=deltas if any(deltas) else (),
        )


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """What the samplers of some rows take beside the prediction, in the order of a layout.

    Attributes:
        latents: ``[M, C]`` in the samplers' own scales.
        coefficients: ``[B, 8]`` of their updates.
    """

    rows: Sequence[Held]
    layout: TokenLayout
    latents: Tensor
    coefficients: Tensor

    @classmethod
    def of(cls, call: Call, missing: Container[int]) -> SamplerInputs:
        """Return that of the rows of a call that have a prediction."""
        layout = call.batch.layout
        keeps = tuple(row not in missing for row in range(len(call.rows)))
        if all(keeps):
            return cls(call.rows, layout, call.latents, call.coefficients)
        kept = [row for row, is_kept in enumerate(keeps) if is_kept]
        latents = call.latents.split(layout.request_tokens)
        return cls(
            [call.rows[row] for row in kept],
            part_of(layout, keeps).layout,
            torch.cat([latents[row] for row in kept]),
            call.coefficients[kept],
        )


def _conditions(starts: Sequence[Start], executor: Executor[Any, Any]) -> Tensor:
    """Return what an inpainting model sees beside latents, ``[M, K]``.

    Of a row without a template, as those that measure a model are, all is to be made: its mask is
    one everywhere, and what it spares is nothing.
    """
    images = []
    for start in starts:
        template = start.row.state.template
        if template is not None:
            assert template.conditions is not None, "its image was encoded for another model"
            images.append(template.conditions)
            continue
        blank = start.latents.new_zeros(executor.num_conditions, *start.latents.shape[1:])
        blank[: executor.num_conditions - len(start.latents)] = 1.0
        images.append(blank)
    return flat_pixels(images)


def flat_pixels(images: Sequence[Tensor]) -> Tensor:
    """Return images ``[C, h, w]`` as rows of pixels ``[M, C]``."""
    return torch.cat([image.permute(1, 2, 0).flatten(0, 1) for image in images])
