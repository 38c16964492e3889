"""Figures as tables: of a model card, and on a terminal."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


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
