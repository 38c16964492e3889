"""Whether pictures show what their prompts say, and tables of such figures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import Tensor

from ray_cluster.quality.classifier import ObjectReading, Reading
from ray_cluster.quality.scenes import Scene, SceneObject

# of every object
OBJECT_ATTRIBUTES = ("shape", "colour", "size", "position")
# the first are counted by object, the last two by picture
COLUMNS = (*OBJECT_ATTRIBUTES, "background", "all")


@dataclass(frozen=True)
class Share:
    """A share of right answers with its 95 % Wilson interval."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share itself; 0 of 0 is 0."""
        return self.right / max(1, self.total)

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the 95 % interval."""
        n, z = max(1, self.total), 1.96
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        spread = (
            z / (1 + z * z / n) * math.sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n))
        )
        return max(0.0, middle - spread), min(1.0, middle + spread)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.1f}-{100 * high:.1f})"


@dataclass(frozen=True)
class Drawn:
    """One prompt's scene, the picture [3, H, W] in 0..1 made for it, and what is read in it."""

    scene: Scene
    pixels: Tensor
    reading: Reading

    @property
    def object_marks(self) -> list[dict[str, bool]]:
        """For every object asked for and every attribute, whether it is as the prompt says.

        An object is looked for at its position, or, where the prompt names none, anywhere in a
        picture with a single object. What the prompt leaves open is right if it can be read.
        """
        return [self._marks(thing) for thing in self.scene.objects]

    @property
    def background_is_right(self) -> bool:
        """Whether the background is as the prompt says, or can be read if it says nothing."""
        shown = self.reading.background
        return shown is not None and self.scene.background in (None, shown)

    @property
    def all_right(self) -> bool:
        """Whether all of every object and the background are right, with nothing beside them."""
        return (
            self.background_is_right
            and len(self.reading.objects) == len(self.scene.objects)
            and all(all(marks.values()) for marks in self.object_marks)
        )

    def _marks(self, asked: SceneObject) -> dict[str, bool]:
        seen = self._find(asked)
        if seen is None:
            return dict.fromkeys(OBJECT_ATTRIBUTES, False)
        marks: dict[str, bool] = {}
        for name in OBJECT_ATTRIBUTES:
            shown, wanted = getattr(seen, name), getattr(asked, name)
            marks[name] = shown is not None and wanted in (None, shown)
        return marks

    def _find(self, asked: SceneObject) -> ObjectReading | None:
        objects = self.reading.objects
        if asked.position is None:
            return objects[0] if len(objects) == 1 else None
        return next((one for one in objects if one.position == asked.position), None)


def count_shares(
    drawn: Sequence[Drawn], chosen: Callable[[Scene], bool] | None = None
) -> dict[str, Share]:
    """The shares of `COLUMNS` over the pictures whose scenes are chosen; all by default."""
    counted = [one for one in drawn if chosen is None or chosen(one.scene)]
    marks = [mark for one in counted for mark in one.object_marks]
    shares = {
        name: Share(sum(mark[name] for mark in marks), len(marks)) for name in OBJECT_ATTRIBUTES
    }
    shares["background"] = Share(sum(one.background_is_right for one in counted), len(counted))
    shares["all"] = Share(sum(one.all_right for one in counted), len(counted))
    return shares


class Rows(NamedTuple):
    """A table: the columns' names, and rows of cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Figures(ABC):
    """What was measured, to be shown and to be written down."""

    @abstractmethod
    def all_rows(self) -> list[Rows]:
        """Return the figures, a table for each kind."""

    def show(self, console: Console | None = None) -> None:
        """Print the tables to a console, or to standard output."""
        for head, rows in self.all_rows():
            table = Table(*head)
            for row in rows:
                table.add_row(*row)
            (console or Console(width=160)).print(table)

    def tables(self) -> str:
        """Return the tables for a model card."""
        return "\n\n".join(markdown_table(*rows) for rows in self.all_rows())


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
