"""Lists that two processes keep equal by sending what has changed.

The owner of a list numbers its changes, the other side says the last number that it has applied,
and gets what has changed since. Messages may be lost, doubled or reordered: what does not follow
what is known is ignored, and the next message of the owner follows what the other side last said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

# changes that a log may hold however few entries there are
_LEAST_TIDIED = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a list of another process is known.

    Attributes:
        session: names the list from its beginning on; 0 names none.
        number: of the last change that is known; 0 before the first.
    """

    session: int = 0
    number: int = 0

    def follows(self, after: Mark, upto: int) -> bool:
        """Whether changes that come after a mark are news to who has this one."""
        if after.session != self.session:
            # of another list, which has to begin
            return after.number == 0
        return after.number <= self.number < upto


@dataclass(frozen=True, slots=True)
class Piece:
    """Some changes, the oldest first.

    Attributes:
        names: of the entries that have changed.
        upto: number of the last of these changes.
    """

    names: tuple[str, ...]
    upto: int


class ChangeLog:
    """Numbers the changes of a list; of each entry only the last one counts.

    Attributes:
        number: of the last change; 0 before the first.
    """

    def __init__(self) -> None:
        self.number = 0
        self._number_of: dict[str, int] = {}
        # by number; of an entry that has changed again, the earlier ones stay for a while
        self._log: list[tuple[int, str]] = []

    def note(self, name: str) -> int:
        """Number a change of an entry, which may be its end."""
        self.number += 1
        self._number_of[name] = self.number
        self._log.append((self.number, name))
        if len(self._log) > _LEAST_TIDIED + 2 * len(self._number_of):
            self._log = [one for one in self._log if self._is_last(*one)]
        return self.number

    def _is_last(self, number: int, name: str) -> bool:
        return self._number_of.get(name) == number

    def forget(self, name: str) -> int:
        """Know no more of the end of an entry; return its number, 0 for none."""
        return self._number_of.pop(name, 0)

    def since(self, number: int, most: int, is_there: Callable[[str], bool]) -> Piece:
        """Return what has changed after a number.

        Args:
            most: entries in a piece; the rest comes after its :attr:`Piece.upto`.
            is_there: whether an entry is in the list. Who knows nothing hears of no others.
        """
        names: list[str] = []
        first, upto = bisect_right(self._log, number, key=itemgetter(0)), number
        for place in range(first, len(self._log)):
            at, name = self._log[place]
            if self._is_last(at, name) and (number or is_there(name)):
                if len(names) == most:
                    return Piece(tuple(names), upto)
                names.append(name)
                upto = at
        return Piece(tuple(names), self.number)
