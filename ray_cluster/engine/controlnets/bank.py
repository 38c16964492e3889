"""One loaded ControlNet, and what it keeps of the requests that it computes residuals for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.controlnets.asks import RowResiduals
from ray_cluster.engine.controlnets.executor import ControlNetExecutor
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet.encoder import PreparedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class BankRow:
    """A step of a request that is kept.

    Attributes:
        key: under which it is.
        latents: ``[C, h, w]``, scaled for the model.
    """

    key: str
    latents: Tensor
    timestep: float


class Bank(Protocol):
    """A ControlNet with the prompts and maps of requests; one thread calls it."""

    def knows(self, key: str) -> bool:
        """Whether a request is kept."""

    def open(self, key: str, conditioning: Conditioning, control_map: Tensor) -> None:
        """Keep a request; those unused for longest go where there are too many.

        Args:
            control_map: ``[H, W, 3]`` uint8.
        """

    def close(self, key: str) -> None:
        """Forget a request, if it is kept."""

    def compute(self, rows: Sequence[BankRow]) -> list[RowResiduals]:
        """Return the residuals of steps of any sizes, timesteps and prompts, in one model call.

        Raises:
            KeyError: a request is not kept.
            ValueError: a map is of another size than the image.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What is kept of a request."""

    prepared: PreparedPrompt
    hint: Tensor
    is_guided: bool

    @property
    def num_bytes(self) -> int:
        added = self.prepared.added
        tensors = [self.prepared.keys_values, self.hint, *([] if added is None else [added])]
        return sum(one.numel() * one.element_size() for one in tensors)


class ControlNetBank:
    """The bank of a ControlNet.

    Attributes:
        executor: of its weights.

    Args:
        max_bytes: of what is kept of requests; the latest one stays in any case.
    """

    def __init__(self, executor: ControlNetExecutor, *, max_bytes: int) -> None:
        self.executor = executor
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, key: str) -> bool:
        """Whether a request is kept."""
        return key in self._kept

    @torch.inference_mode()
    def open(self, key: str, conditioning: Conditioning, control_map: Tensor) -> None:
        """Keep a request; see :meth:`Bank.open`."""
        self.close(key)
        executor = self.executor
        kept = _Kept(
            executor.prepare(_on(executor.device, conditioning)),
            executor.embed(control_map),
            conditioning.is_guided,
        )
        self._kept[key] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self.close(next(iter(self._kept)))

    def close(self, key: str) -> None:
        """Forget a request, if it is kept."""
        if (kept := self._kept.pop(key, None)) is not None:
            self._num_bytes -= kept.num_bytes

    @torch.inference_mode()
    def compute(self, rows: Sequence[BankRow]) -> list[RowResiduals]:
        """Return the residuals of steps; see :meth:`Bank.compute`."""
        executor, device = self.executor, self.executor.device
        kept = [self._kept[row.key] for row in rows]
        for row in rows:
            self._kept.move_to_end(row.key)
        for row, one in zip(rows, kept, strict=True):
            _check_sizes(row, one.hint)
        sizes = [
            (*row.latents.shape[1:], one.is_guided) for row, one in zip(rows, kept, strict=True)
        ]
        composition, order = composition_of(sizes)
        images = [rows[index].latents.to(device) for index in order]
        batch = StepBatch(
            layout=layout_of(composition, executor.num_levels),
            latents=torch.cat([image.permute(1, 2, 0).flatten(0, 1) for image in images]),
            timesteps=torch.tensor([rows[index].timestep for index in order], device=device),
            prepared=tuple(kept[index].prepared for index in order),
            # ControlNets take no guidance scale
            guidance_scales=torch.ones(len(order), device=device),
        )
        made = executor.compute(batch, [kept[index].hint for index in order])
        by_row = dict(zip(order, made, strict=True))
        return [by_row[index] for index in range(len(rows))]


def _check_sizes(row: BankRow, hint: Tensor) -> None:
    height, width = row.latents.shape[1:]
    if len(hint) != height * width:
        raise ValueError(
            f"the map of {row.key} comes to {len(hint)} latent pixels, its latents are "
            f"{height} x {width}: a map is of the size of the image"
        )


def _on(device: torch.device, conditioning: Conditioning) -> Conditioning:
    tensors = conditioning.tensors().items()
    return Conditioning.of({name: tensor.to(device) for name, tensor in tensors})
