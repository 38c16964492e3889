"""The row that says which dispatcher owns a job store: nobody else may write to it.

An owner has an epoch, larger than all before it, and every transaction that writes begins with a
look at it. So a dispatcher that was taken for dead, and is not, writes nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import sqlalchemy as sa

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_engine import JobStoreError

_OWNER = sa.table(
    "owner",
    *map(sa.column, ("name", "epoch", "holder", "beat")),
    sa.column("is_released", sa.Boolean),
)
_NAME = "dispatcher"
_HOLDER: TextCodec[Holder] = TextCodec(Holder)
_CONTROL = sa.table("control", *map(sa.column, ("name", "document")))
_HAND_OVER = "hand_over"
_MOST_SUPERSEDED = 20


class JobStoreTaken(JobStoreError):
    """Another dispatcher owns the job store by now; the present one may write no more."""


def is_there(connection: sa.Connection) -> bool:
    """Whether a database can have an owner."""
    return sa.inspect(connection).has_table("owner")


@dataclass(frozen=True, slots=True)
class HandOver:
    """What an owner says to dispatchers of other cells, and they to it.

    Attributes:
        epoch: of the owner.
        service: whose dispatchers it hands the store over to; empty for nobody's.
        wanted_by: the cell of one that is ready to take it; empty for none.
        superseded: cells from which it has come: they do not want it back while it is owned.
    """

    epoch: int
    service: str
    wanted_by: str = ""
    superseded: tuple[str, ...] = ()

    @staticmethod
    def read(connection: sa.Connection) -> HandOver | None:
        """Return what was written last; None where that is nothing, or nothing readable."""
        wanted = sa.select(_CONTROL.c.document).where(_CONTROL.c.name == _HAND_OVER)
        text = connection.execute(wanted).scalar()
        try:
            return None if text is None else _SAID.decode(text)
        except CodecError:
            return None

    def write(self, connection: sa.Connection) -> None:
        """Write it in place of what there was."""
        row = {"document": _SAID.encode(self)}
        changes = sa.update(_CONTROL).where(_CONTROL.c.name == _HAND_OVER).values(row)
        if not connection.execute(changes).rowcount:
            connection.execute(sa.insert(_CONTROL).values(name=_HAND_OVER, **row))


_SAID: TextCodec[HandOver] = TextCodec(HandOver)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a job store.

    Attributes:
        holder: None where a later release has written what this one cannot read.
        beat: another number after each of its writes.
        is_released: whether it has stopped, or handed the store over.
        hand_over: what it says to others; None where its release says nothing.
    """

    epoch: int
    holder: Holder | None
    beat: int
    is_released: bool
    hand_over: HandOver | None = None

    @classmethod
    def read(cls, connection: sa.Connection) -> Self | None:
        """Return the present owner; None if there never was one."""
        row = connection.execute(sa.select(_OWNER)).first()
        if row is None:
            return None
        try:
            holder = _HOLDER.decode(row.holder)
        except CodecError:
            holder = None
        said = HandOver.read(connection)
        # what an earlier owner has said is no more than that
        hand_over = said if said is not None and said.epoch == row.epoch else None
        return cls(row.epoch, holder, row.beat, bool(row.is_released), hand_over)


def take(connection: sa.Connection, holder: Holder, before: Owner | None) -> int:
    """Own a store from now on, in the connection's transaction; return the epoch.

    Args:
        before: who owned it when that was looked at.

    Raises:
        JobStoreTaken: somebody else has taken it since.
    """
    epoch = 1 if before is None else before.epoch + 1
    values = {"epoch": epoch, "holder": _HOLDER.encode(holder), "beat": 0, "is_released": False}
    if before is None:
        connection.execute(sa.insert(_OWNER).values(name=_NAME, **values))
        return epoch
    if not connection.execute(_of(before.epoch).values(values)).rowcount:
        raise JobStoreTaken("another dispatcher has just taken the job store")
    return epoch


def offer(
    connection: sa.Connection, epoch: int, cell: str, service: str, before: Owner | None
) -> None:
    """Say to whom an owner hands the store over, and from which cells it has come."""
    said = None if before is None else before.hand_over
    earlier = () if said is None else said.superseded
    if before is not None and before.holder is not None:
        earlier = (*earlier, before.holder.cell)
    if cell in earlier:
        # it has come back as a later one was gone, which may have it again
        earlier = earlier[: earlier.index(cell)]
    HandOver(epoch, service, superseded=earlier[-_MOST_SUPERSEDED:]).write(connection)


def ask(connection: sa.Connection, epoch: int, cell: str) -> None:
    """Ask the owner of an epoch for the store, which a dispatcher of a cell is ready to take."""
    # nobody takes it meanwhile
    connection.execute(_of(epoch).values(beat=_OWNER.c.beat))
    said = HandOver.read(connection)
    if said is not None and said.epoch == epoch:
        replace(said, wanted_by=cell).write(connection)


def wanted_by(connection: sa.Connection, epoch: int) -> str:
    """Return the cell whose dispatcher asks the owner of an epoch for the store."""
    said = HandOver.read(connection)
    return said.wanted_by if said is not None and said.epoch == epoch else ""


def fence(connection: sa.Connection, epoch: int) -> None:
    """Let the connection's transaction write as the owner of an epoch.

    Raises:
        JobStoreTaken: it is the owner no more, or has let the next one have it.
    """
    is_kept = _of(epoch).where(_OWNER.c.is_released.is_(False))
    if not connection.execute(is_kept.values(beat=_OWNER.c.beat + 1)).rowcount:
        raise JobStoreTaken("another dispatcher owns the job store by now: this one must end")


def release(connection: sa.Connection, epoch: int) -> None:
    """Own a store no more, so that the next one need not wait; nothing is written after this."""
    connection.execute(_of(epoch).values(is_released=True))


def _of(epoch: int) -> sa.Update:
    return sa.update(_OWNER).where(_OWNER.c.epoch == epoch)
