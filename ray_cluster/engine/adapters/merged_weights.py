"""The weights of a model with a request's LoRAs in them, beside the model's own.

They are made one weight at a time, between steps, and take the places of the model's own all at
once. The model's own tensors are kept meanwhile: what is put back are these, and nothing is
subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ray_cluster.compat import is_offloaded
from ray_cluster.engine.adapters.deltas import LayerDeltas, bound_deltas, layers_of
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.adapters.weight_parts import HeldWeight, WeightPart, parts_of
from ray_cluster.errors import ModelUnsupported

# of each element: as it is in PyTorch's order, what is added, and their sum, in float32
_BYTES_WHILE_MADE = 12


@dataclass(slots=True)
class _Changed:
    """A weight that deltas change.

    Attributes:
        added: what is added to parts of it.
        other: the merged weight, and while that is in place the model's own; None until it is made.
    """

    weight: HeldWeight
    added: list[tuple[WeightPart, LowRank]] = field(default_factory=list)
    other: Tensor | None = None


class MergedWeights:
    """The weights of layers with deltas in them: ``W + B A``. One thread uses it.

    Args:
        deltas: of low rank, bound to a model.
        unmerged: layers whose weights stay as they are.

    Attributes:
        deltas: these.
        is_in: whether the model computes with them now.
        on_exchange: called after weights have taken each other's places.

    Raises:
        ModelUnsupported: a delta is of another kind, or the weight of a layer is quantised, or not
            on the device until it is called.
    """

    def __init__(self, deltas: LayerDeltas, *, unmerged: Collection[nn.Module] = ()) -> None:
        self.deltas = deltas
        self.is_in = False
        self.on_exchange: Callable[[], None] = lambda: None
        by_weight: dict[int, _Changed] = {}
        for layer, delta in deltas.items():
            if layer in unmerged:
                continue
            low_rank = _checked(layer, delta)
            for part in parts_of(layer):
                changed = by_weight.setdefault(id(part.weight), _Changed(part.weight))
                changed.added.append((part, low_rank))
        self._changed = list(by_weight.values())
        self._num_made = 0

    @property
    def num_bytes(self) -> int:
        """Of all of them, made or not."""
        return sum(one.weight.tensor.nbytes for one in self._changed)

    @property
    def num_bytes_left(self) -> int:
        """Of those that are not made yet."""
        return sum(one.weight.tensor.nbytes for one in self._changed[self._num_made :])

    @property
    def peak_bytes(self) -> int:
        """Of all of them, and of what is needed beside the largest one while it is made."""
        plain = max((one.weight.tensor.numel() for one in self._changed), default=0)
        return self.num_bytes + _BYTES_WHILE_MADE * plain

    @property
    def is_made(self) -> bool:
        """Whether all are."""
        return self._num_made == len(self._changed)

    @torch.inference_mode()
    def make_next(self) -> None:
        """Make one more weight; the model goes on with its own."""
        changed = self._changed[self._num_made]
        plain = changed.weight.plain()
        for part, low_rank in changed.added:
            _add(plain[part.rows], low_rank, part.outputs)
        changed.other = changed.weight.ordered(plain)
        self._num_made += 1

    def exchange(self) -> None:
        """Let them and the model's own weights take each other's places, between two steps.

        Raises:
            ValueError: not all of them are made.
        """
        if not self.is_made:
            left = len(self._changed) - self._num_made
            raise ValueError(f"{left} of {len(self._changed)} merged weights are not made yet")
        for one in self._changed:
            assert one.other is not None, "all are made"
            one.weight.tensor, one.other = one.other, one.weight.tensor
        self.is_in = not self.is_in
        self.on_exchange()


class AdaptedModel:
    """What executors of all families do for deltas of their model's layers."""

    _model: nn.Module
    # what these make of a prompt is kept: it would be another one with other weights
    _of_prompts: Collection[nn.Module]

    @property
    def layers(self) -> Mapping[str, nn.Linear | nn.Conv2d]:
        """The layers that :meth:`bind` knows."""
        return layers_of(self._model)

    def bind(self, deltas: Mapping[str, Delta]) -> LayerDeltas:
        """Return deltas for requests of this model; any linear layer and convolution may have one.

        Raises:
            ModelUnsupported: a path names no such layer.
        """
        return bound_deltas(self._model, deltas)

    def merged(self, deltas: LayerDeltas) -> MergedWeights:
        """Return weights with a request's deltas in them; see :meth:`Executor.merged`."""
        return MergedWeights(deltas, unmerged=self._of_prompts)


def _checked(layer: nn.Module, delta: object) -> LowRank:
    if not isinstance(delta, LowRank):
        raise ModelUnsupported(
            f"a {type(delta).__name__} cannot be merged into a {type(layer).__name__}; allowed: "
            "products of low rank"
        )
    if isinstance(layer.weight, Tensor) and not layer.weight.is_floating_point():
        raise ModelUnsupported(
            "the weights of this model are quantised: nothing is merged into them"
        )
    if is_offloaded(layer):
        raise ModelUnsupported(
            "the weights of this model are offloaded, so nothing can be merged into them; set the "
            "pool's offload: never, or loras.merge: never"
        )
    return delta


def _add(rows: Tensor, low_rank: LowRank, outputs: slice) -> None:
    """Add what a delta is for some outputs of its layer to their weights ``[d, ...]``, in place."""
    expand, shrink = low_rank.expand[outputs].float(), low_rank.shrink.flatten(1).float()
    # in half precision it is rounded once, as a whole
    rows.copy_(rows.float() + (expand @ shrink).view_as(rows))
