"""Products that some requests of a batch add to the outputs of layers, such as unmerged LoRAs.

A layer's own product runs once over all rows of a batch. What a request adds to it is made of the
request's own rows, and added to its rows of the result. Requests without any cost nothing. The
low-rank products of several requests run together; see ``adapters/grouping.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from ray_cluster.engine.adapters.grouping import Addition, Delta, Stacks, additions
from ray_cluster.errors import ModelUnsupported

LayerDeltas = Mapping[nn.Module, Delta]
"""What a request adds, by the layer of the original model; see :func:`bound_deltas`. Neighbours in
a batch that have the same object share their products."""

_NUM_NAMED = 3
_ALL = slice(None)
# of a batch's rows that are cut or spread in different ways
_MOST_DERIVED = 64


def layers_of(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers of a model that deltas may name, by path."""
    return {
        path: part
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    }


def bound_deltas(model: nn.Module, deltas: Mapping[str, Delta]) -> LayerDeltas:
    """Return deltas by the layers of a model that their paths name.

    Args:
        deltas: by path, such as ``mid_block.attentions.0.transformer_blocks.0.attn1.to_q``.

    Raises:
        ModelUnsupported: a path names no linear layer or convolution of the model.
    """
    layers = layers_of(model)
    unknown = [path for path in deltas if path not in layers]
    if unknown:
        raise ModelUnsupported(
            f"{len(unknown)} of {len(deltas)} deltas name no layer of this "
            f"{type(model).__name__}: {unknown[:_NUM_NAMED]}; allowed: its {len(layers)} linear "
            f"layers and convolutions, such as {list(layers)[:_NUM_NAMED]}"
        )
    return {layers[path]: delta for path, delta in deltas.items()}


class Owned(NamedTuple):
    """Which columns of a product are a layer's outputs."""

    layer: nn.Module
    columns: slice


def owned_by(layers: Sequence[Any]) -> tuple[Owned, ...]:
    """Return the columns of linear layers or convolutions whose outputs are beside each other."""
    widths = [
        layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
        for layer in layers
    ]
    columns = (slice(*pair) for pair in pairwise(accumulate(widths, initial=0)))
    return tuple(map(Owned, layers, columns))


class DeltaSpan(NamedTuple):
    """Consecutive rows of a matrix, or images, that have the same deltas."""

    rows: slice
    deltas: LayerDeltas


class _Kept:
    """What was worked out for some spans, so that the next step finds it."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks
        self.derived: dict[tuple[object, ...], RowDeltas | None] = {}
        self.additions: dict[tuple[nn.Module, int, bool], tuple[Addition, ...]] = {}


@dataclass(frozen=True, slots=True)
class RowDeltas:
    """Which rows of a matrix, or which of some images, have deltas.

    Attributes:
        spans: in rising order, at least one.
    """

    spans: tuple[DeltaSpan, ...]
    _kept: _Kept = field(default_factory=lambda: _Kept(Stacks()), repr=False, compare=False)

    @classmethod
    def of(cls, owners: Sequence[LayerDeltas | None]) -> RowDeltas | None:
        """Return those of rows that have these deltas each; None where none has any."""
        spans, first = [], 0
        for _, alike in groupby(owners, key=id):
            run = list(alike)
            last = first + len(run)
            if run[0]:
                spans.append(DeltaSpan(slice(first, last), run[0]))
            first = last
        return cls(tuple(spans)) if spans else None

    def expect_more_steps(self) -> None:
        """Take the time to stack what the rows' deltas are made of: there will be more steps."""
        self._kept.stacks.are_worthwhile = True

    def spread(self, counts: Sequence[int]) -> RowDeltas:
        """Return those of a matrix that has so many rows of each of these."""

        def spans() -> Iterator[DeltaSpan]:
            starts = list(accumulate(counts, initial=0))
            for rows, deltas in self.spans:
                yield DeltaSpan(slice(starts[rows.start], starts[rows.stop]), deltas)

        found = self._derived(("spread", *counts), spans)
        assert found is not None, "every span has rows"
        return found

    def within(self, part: slice) -> RowDeltas | None:
        """Return those of consecutive rows, counted from the first of them."""
        first, last = part.start, part.stop

        def spans() -> Iterator[DeltaSpan]:
            for rows, deltas in self.spans:
                if rows.start < last and first < rows.stop:
                    own = slice(max(rows.start, first) - first, min(rows.stop, last) - first)
                    yield DeltaSpan(own, deltas)

        return self._derived(("within", first, last), spans)

    def _derived(
        self, key: tuple[object, ...], spans: Callable[[], Iterator[DeltaSpan]]
    ) -> RowDeltas | None:
        known = self._kept.derived
        if key not in known:
            if len(known) >= _MOST_DERIVED:
                known.clear()
            found = tuple(spans())
            known[key] = RowDeltas(found, _Kept(self._kept.stacks)) if found else None
        return known[key]

    def of_layer(self, layer: nn.Module) -> Iterator[tuple[slice, Delta]]:
        """Yield the rows that have a delta of a layer, each with theirs."""
        for rows, deltas in self.spans:
            if (delta := deltas.get(layer)) is not None:
                yield rows, delta

    def add(self, owned: Sequence[Owned], inputs: Tensor, outputs: Tensor) -> None:
        """Add what the layers of a product are to be given, in place.

        Args:
            inputs: ``[N, ...]``, all rows or images.
            outputs: ``[N, D, ...]``, of all layers beside each other.
        """
        if len(owned) == 1:
            self.add_part(owned[0].layer, inputs, outputs, _ALL)
            return
        for layer, columns in owned:
            self.add_part(layer, inputs, outputs[:, columns], _ALL)

    def add_part(self, layer: nn.Module, inputs: Tensor, outputs: Tensor, columns: slice) -> None:
        """Add of what a layer is to be given some columns, in place.

        Args:
            outputs: ``[N, D, ...]``, these columns alone.
        """
        known, stacks = self._kept.additions, self._kept.stacks
        key = (layer, inputs.ndim, stacks.are_worthwhile)
        if key not in known:
            known[key] = additions(list(self.of_layer(layer)), inputs.ndim, stacks)
        for add in known[key]:
            add(inputs, outputs, columns)

    def runs(self, layer: nn.Module, count: int) -> Iterator[tuple[slice, RowDeltas | None]]:
        """Yield all rows in runs: each with its deltas if it has some of a layer, or else None.

        Args:
            count: of rows.
        """
        edges: set[int] = set()
        for rows, _ in self.of_layer(layer):
            # where a span begins at which another one ends there is no edge
            edges ^= {rows.start, rows.stop}
        starts = sorted(edges)[::2]
        for pair in pairwise(sorted(edges | {0, count})):
            run = slice(*pair)
            yield run, self.within(run) if run.start in starts else None


@contextmanager
def adding(deltas: RowDeltas | None, model: nn.Module) -> Iterator[None]:
    """Add deltas to the outputs of layers that are called as they are, within a model's own code.

    Args:
        deltas: of the first dimension of what the layers are called with.
    """
    if deltas is None:
        yield
        return

    def add(layer: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
        for rows, delta in deltas.of_layer(layer):
            outputs[rows].add_(_called(delta, layer, inputs[0][rows]))

    changed = [part for part in model.modules() if any(deltas.of_layer(part))]
    handles = [part.register_forward_hook(add) for part in changed]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called(delta: Delta, layer: nn.Module, inputs: Tensor) -> Tensor:
    """Call a delta as the type says, with what a layer itself takes in any shape."""
    if not isinstance(layer, nn.Conv2d):
        return _of_rows(delta, inputs)
    if layer.kernel_size != (1, 1):
        return delta(inputs)
    return _of_rows(delta, inputs.movedim(1, -1)).movedim(-1, 1)


def _of_rows(delta: Delta, inputs: Tensor) -> Tensor:
    """Call a delta of rows with ``[..., C]``."""
    outputs: Tensor = delta(inputs.flatten(0, -2)).unflatten(0, inputs.shape[:-1])
    return outputs
