"""What the step engine asks of a model: one call over a batch, in two halves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ray_cluster.engine.state import Conditioning

EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one denoising step, all of one size.

    Attributes:
        latents: ``[B, C, H, W]`` float32, already scaled for the model.
        timesteps: ``[B]`` float32, each row's own.
        conditionings: one per row.
        guidance_scales: one per row; a second model row is computed where it is above 1.
    """

    latents: Tensor
    timesteps: Tensor
    conditionings: tuple[Conditioning, ...]
    guidance_scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Residuals:
    """What a ControlNet adds between the halves.

    Attributes:
        down: one ``[R, C, H, W]`` per skip connection.
        mid: ``[R, C, H, W]``.
    """

    down: tuple[Tensor, ...]
    mid: Tensor


class Executor(Protocol, Generic[EncodedT]):
    """A model on a set of ranks, called once per denoising step.

    ``open`` lays the batch out and ``encode_half`` runs the down and mid blocks; what they return
    goes into ``decode_half``, which runs the up blocks and applies guidance. Residuals may arrive
    between the halves (SwiftDiffusion §4.1).
    """

    @property
    def device(self) -> torch.device:
        """Where latents must be."""

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""

    def encode_half(self, batch: StepBatch) -> EncodedT:
        """Run the first half and return what the second half needs."""

    def decode_half(self, encoded: EncodedT, residuals: Residuals | None = None) -> Tensor:
        """Return the prediction after guidance, ``[B, C, H, W]`` float32."""
