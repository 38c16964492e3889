"""One loaded ControlNet, and what it keeps of the requests that it computes residuals for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ray_cluster.engine.controls.asks import RowResiduals
from ray_cluster.engine.state import Conditioning


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
        """
