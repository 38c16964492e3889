"""Calls of a model on sets of ranks, one by one and as the steps of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.groups.ranks import GuidanceRows
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.state import Conditioning
from tests.engine.conftest import Zoo
from tests.engine.dits import MixedCall, dit_request
from tests.engine.groups.rank_processes import Call, Kept, RankProcesses
from tests.engine.harness import start_all

Way = tuple[range, GuidanceRows]
WAYS: tuple[Way, ...] = (
    (range(1), "together"),
    (range(3, 4), "together"),
    (range(2), "together"),
    (range(2, 4), "apart"),
    (range(4), "together"),
    (range(4), "apart"),
)

# images of 7 x 9 and of 11 x 5 tokens, so that ranks have unlike numbers of them
ODD_PX = ((56, 72), (88, 40))
ODD_PROMPT = 29
_OF_TOKENS = ("prompt_embeds", "negative_embeds")
_SCALES = (1.0, 3.0)


def calls_of(
    zoo: Zoo,
    name: str,
    sizes_px: Sequence[tuple[int, int]] = ODD_PX,
    num_prompt: int = ODD_PROMPT,
) -> MixedCall:
    """Return what two images are called with: one without guidance, and one with it.

    Args:
        num_prompt: tokens that are left of each prompt.
    """
    model = zoo.model(name)
    requests = [
        dit_request(
            f"r{index}",
            prompt="red " * (index + 1),
            guidance_scale=_SCALES[index],
            width_px=width,
            height_px=height,
        )
        for index, (width, height) in enumerate(sizes_px)
    ]
    states = start_all(model, requests)
    generator = torch.Generator().manual_seed(0)
    return MixedCall(
        [torch.randn(state.latents.shape, generator=generator) for state in states],
        torch.tensor([905.0, 205.0]),
        [_shortened(state.conditioning, num_prompt) for state in states],
        list(_SCALES),
    )


def _shortened(whole: Conditioning, count: int) -> Conditioning:
    tensors = whole.tensors()
    short = {name: one[:count].clone() for name, one in tensors.items() if name in _OF_TOKENS}
    return Conditioning(**(tensors | short))


class OnRanks:
    """What the images of a call are predicted to be by ranks."""

    def __init__(self, ranks: RankProcesses, folder: Path, call: MixedCall) -> None:
        self.ranks, self._folder, self._call = ranks, folder, call
        self._indices = range(len(call.latents))

    def keep(
        self, deltas: Sequence[Mapping[str, Delta] | None] = (), on: Sequence[int] = range(4)
    ) -> None:
        """Have ranks keep what the images' calls are conditioned on."""
        for index in self._indices:
            own = deltas[index] if deltas else None
            conditioning = self._call.conditionings[index]
            self.ranks.keep(Kept(f"{index}", self._folder, conditioning, own), on)

    def call(self, index: int, way: Way, **changes: Any) -> Call:
        """Return the call of an image on a set of ranks."""
        values = {
            "key": f"{index}",
            "latents": self._call.latents[index],
            "timestep": float(self._call.timesteps[index]),
            "scale": self._call.scales[index],
            "ranks": way[0],
            "rows": way[1],
        }
        return Call(**(values | changes))

    def error(self, index: int, found: Tensor, expected: Sequence[Tensor]) -> float:
        """How far an image's prediction is off, as one of its model rows."""
        others = [*expected]
        others[index] = found
        return self._call.errors(others, expected)[index]

    def run(self, way: Way) -> list[Tensor]:
        """Call the model for each image, one after the other."""
        return [self.ranks.predict(self.call(index, way))[0] for index in self._indices]


class RoamingExecutor:
    """A model's executor for an engine, each of whose steps is on other ranks than the last one's.

    Args:
        own: answers all but the calls.

    Attributes:
        num_calls: made so far.
    """

    def __init__(
        self, own: Any, ranks: RankProcesses, folder: Path, ways: Iterable[Way] = WAYS
    ) -> None:
        self._own, self._ranks, self._folder = own, ranks, folder
        self._ways = cycle(ways)
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def prepare(self, conditioning: Conditioning, _deltas: object = None) -> str:
        """Have the ranks keep a request."""
        self._ranks.keep(Kept("roaming", self._folder, conditioning))
        return "roaming"

    def encode_half(self, batch: StepBatch[str]) -> StepBatch[str]:
        """Leave all to the second half."""
        return batch

    def decode_half(self, batch: StepBatch[str], _residuals: None = None) -> Tensor:
        """Call the model for one request on the next set of ranks."""
        self.num_calls += 1
        (group,), (key,) = batch.layout.composition, batch.prepared
        latents = batch.latents.unflatten(0, (group.height, group.width)).permute(2, 0, 1)
        scale, timestep = float(batch.guidance_scales), float(batch.timesteps)
        [found] = self._ranks.predict(Call(key, latents, timestep, scale, *next(self._ways)))
        return found.permute(1, 2, 0).flatten(0, 1)
