"""Products of several requests together are those one by one, however their rows lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters import grouping
from ray_cluster.engine.adapters.deltas import LayerDeltas, RowDeltas, owned_by
from ray_cluster.engine.adapters.low_rank import LowRank, packed

# owners of rows, by number; None: no delta
LAYS = [
    [0, 1, 2, 3],
    [0, 0, 0],
    [None, 0, None, 1, None, 2],
    [0, 1, None, 2, 0, 1],
    [0, 0, 1, 2, 2, None, 3],
]
RANKS = (4, 16, 8, 4)
# alike: of one shape, in one vector each, as of sets that are bound to a model
ALIKE = (4, 4, 4, 4)


def factors(layer: Any, rank: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    weight = layer.weight
    shrink = torch.randn(rank, *weight.shape[1:], generator=generator)
    expand = torch.randn(len(weight), rank, generator=generator)
    if not isinstance(layer, nn.Conv2d):
        return LowRank(shrink, expand)
    shape: Any = (layer.stride, layer.padding)
    return LowRank(shrink, expand, *shape)


def opaque(one: LowRank) -> Callable[[Tensor], Tensor]:
    """The same delta, of which no more than its results is known."""

    def called(inputs: Tensor) -> Tensor:
        return one(inputs)

    return called


def added(owners: Sequence[LayerDeltas | None], layers: Any, inputs: Tensor) -> list[Tensor]:
    """What rows gain in the first step and in the second, from zeros."""
    deltas = RowDeltas.of(owners)
    assert deltas is not None
    owned, found = owned_by(layers), []
    for _ in range(2):
        width = owned[-1].columns.stop
        if inputs.ndim == 2:
            outputs = torch.zeros(len(inputs), width)
        else:
            outputs = torch.zeros_like(layers[0](inputs)).contiguous(
                memory_format=torch.channels_last
            )
        deltas.add(owned, inputs, outputs)
        found.append(outputs)
        deltas.expect_more_steps()
    return found


def both(
    lay: Sequence[int | None],
    layers: Sequence[nn.Module],
    counts: Sequence[int],
    inputs: Tensor,
    ranks: Sequence[int],
) -> tuple[list[Tensor], list[Tensor]]:
    """What is added by factors that are known, and by deltas that are opaque."""
    sets = []
    for one in range(4):
        drawn = {
            str(place): factors(layer, ranks[one], 10 * one + place)
            for place, layer in enumerate(layers)
        }
        found = packed(drawn) if ranks is ALIKE else drawn
        sets.append(dict(zip(layers, found.values(), strict=True)))
    hidden = [{layer: opaque(one) for layer, one in some.items()} for some in sets]
    results = []
    for some in (sets, hidden):
        owners = [None if one is None else some[one] for one in lay]
        rows: list[LayerDeltas | None] = []
        for owner, count in zip(owners, counts, strict=True):
            rows += [owner] * count  # type: ignore[list-item]
        results.append(added(rows, layers, inputs))
    return results[0], results[1]


@pytest.mark.parametrize("lay", LAYS, ids=str)
@pytest.mark.parametrize("lengths", ["alike", "different"])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("ranks", [RANKS, ALIKE], ids=str)
@torch.inference_mode()
def test_rows_gain_what_each_delta_gives(
    lay: list[int | None],
    lengths: str,
    ranks: Sequence[int],
    small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not small:
        monkeypatch.setattr(grouping, "_SMALL_PRODUCT", 0)
    layers = [nn.Linear(24, 40), nn.Linear(24, 8)]
    counts = [5 if lengths == "alike" else 3 + index % 3 for index in range(len(lay))]
    inputs = torch.randn(sum(counts), 24, generator=torch.Generator().manual_seed(1))
    found, truth = both(lay, layers, counts, inputs, ranks)
    assert truth[0].abs().max() > 10
    for one in found:
        assert (one - truth[0]).abs().max() <= 1e-4
        # rows without a delta gain nothing at all
        assert torch.equal(one == 0, truth[0] == 0)


@pytest.mark.parametrize("lay", LAYS, ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 10, 3, padding=1),
        nn.Conv2d(6, 10, 3, stride=2, padding=1),
        nn.Conv2d(6, 10, (5, 3), stride=(1, 2), padding=(0, 1)),
        nn.Conv2d(6, 10, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("ranks", [RANKS, ALIKE], ids=str)
@torch.inference_mode()
def test_images_gain_what_each_delta_gives(
    lay: list[int | None],
    layer: nn.Conv2d,
    ranks: Sequence[int],
    small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not small:
        monkeypatch.setattr(grouping, "_MOST_WINDOW_ELEMENTS", 0)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(lay), 9, 12, 6, generator=generator)
    found, truth = both(lay, [layer], [1] * len(lay), rows.permute(0, 3, 1, 2), ranks)
    assert truth[0].abs().max() > 10
    for one in found:
        assert (one - truth[0]).abs().max() <= 2e-4


@torch.inference_mode()
def test_products_of_one_length_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = grouping.grouped_low_rank

    def counted(outputs: Tensor, inputs: Tensor, shrink: Tensor, *rest: Any) -> Tensor:
        calls.append(len(shrink))
        return real(outputs, inputs, shrink, *rest)

    monkeypatch.setattr(grouping, "grouped_low_rank", counted)
    layer = nn.Linear(24, 40)
    owners = [{layer: factors(layer, rank, seed)} for seed, rank in enumerate(RANKS)]
    added(owners, [layer], torch.randn(4, 24))
    # the first step is one by one: perhaps there is no second with these rows
    assert calls == [1, 1, 1, 1, 4]
    calls.clear()
    alike = [packed({"": factors(layer, 4, seed)})[""] for seed in range(4)]
    added([{layer: one} for one in alike], [layer], torch.randn(4, 24))
    assert calls == [4, 4]
