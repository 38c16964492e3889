"""Latency tables: seconds of single operations on one device, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Operation = Literal["step", "image", "encode", "decode", "discriminate", "load"]
"""``step`` is one denoising step of a batch, ``image`` all of them and what else its source counts,
``encode`` a batch's prompts, ``decode`` its latents, ``discriminate`` its confidences, and ``load``
a model from storage until it can serve."""

FigureKind = Literal["measured", "published", "modelled"]


class SizeCount(NamedTuple):
    """Images of one size in a batch of several."""

    width_px: int
    height_px: int
    batch: int = 1


class OperationKey(NamedTuple):
    """What an operation's seconds depend on.

    Attributes:
        width_px: of each image; 0 where it does not matter.
        batch: images in it, of that size.
        sp_degree: devices that do it together.
        uses_guidance: whether every image takes two rows of the model's batch.
        num_steps: of an ``image``; else 0.
        beside: images of other sizes in the same model call of a ``step``, by rising size.
    """

    operation: Operation
    width_px: int = 0
    height_px: int = 0
    batch: int = 1
    sp_degree: int = 1
    uses_guidance: bool = False
    num_steps: int = 0
    beside: tuple[SizeCount, ...] = ()

    @property
    def sizes(self) -> tuple[SizeCount, ...]:
        return (SizeCount(self.width_px, self.height_px, self.batch), *self.beside)

    @property
    def num_images(self) -> int:
        return sum(one.batch for one in self.sizes)

    def of_sizes(self, sizes: Iterable[SizeCount]) -> OperationKey:
        """Return the same operation on these images, each size once, at least one."""
        first, *others = sorted(sizes)
        return self._replace(
            width_px=first.width_px,
            height_px=first.height_px,
            batch=first.batch,
            beside=tuple(others),
        )


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One figure of a table.

    Attributes:
        seconds: of the whole batch.
        kind: ``measured`` on a machine, ``published`` by others, or ``modelled`` by a formula.
        source: machine, date and commit; page or table; or the formula.
        cv: standard deviation over the mean of repeated measurements; 0 if unknown.
    """

    key: OperationKey
    seconds: float
    kind: FigureKind
    source: str
    cv: float = 0.0


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """The table of one model on one kind of device."""

    name: str
    model: str
    device: str
    rows: tuple[LatencyRow, ...]

    @property
    def kinds(self) -> tuple[FigureKind, ...]:
        return tuple(sorted({row.kind for row in self.rows}))

    def find(self, key: OperationKey) -> LatencyRow | None:
        """Return the row of exactly this operation, if there is one."""
        return next((row for row in self.rows if row.key == key), None)

    def of(self, operation: Operation) -> tuple[LatencyRow, ...]:
        return tuple(row for row in self.rows if row.key.operation == operation)


def repeated_keys(rows: Iterable[LatencyRow]) -> tuple[OperationKey, ...]:
    """Return the keys that more than one row has."""
    seen: set[OperationKey] = set()
    repeated: dict[OperationKey, None] = {}
    for row in rows:
        if row.key in seen:
            repeated[row.key] = None
        seen.add(row.key)
    return tuple(repeated)
