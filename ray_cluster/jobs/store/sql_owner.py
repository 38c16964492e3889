"""The row that says which dispatcher owns a job store: nobody else may write to it.

An owner has an epoch, larger than all before it, and every transaction that writes begins with a
look at it. So a dispatcher that was taken for dead, and is not, writes nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import sqlalchemy as sa

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_engine import JobStoreError

_OWNER = sa.table("owner", *map(sa.column, ("name", "epoch", "holder", "beat", "is_released")))
_NAME = "dispatcher"
_HOLDER: TextCodec[Holder] = TextCodec(Holder)


class JobStoreTaken(JobStoreError):
    """Another dispatcher owns the job store by now; the present one may write no more."""


def is_there(connection: sa.Connection) -> bool:
    """Whether a database can have an owner."""
    return sa.inspect(connection).has_table("owner")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a job store.

    Attributes:
        holder: None where a later release has written what this one cannot read.
        beat: another number after each of its writes.
        is_released: whether it has stopped.
    """

    epoch: int
    holder: Holder | None
    beat: int
    is_released: bool

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
        return cls(row.epoch, holder, row.beat, bool(row.is_released))


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


def fence(connection: sa.Connection, epoch: int) -> None:
    """Let the connection's transaction write as the owner of an epoch.

    Raises:
        JobStoreTaken: it is the owner no more.
    """
    if not connection.execute(_of(epoch).values(beat=_OWNER.c.beat + 1)).rowcount:
        raise JobStoreTaken("another dispatcher owns the job store by now: this one must end")


def release(connection: sa.Connection, epoch: int) -> None:
    """Own a store no more, so that the next one need not wait."""
    connection.execute(_of(epoch).values(is_released=True))


def _of(epoch: int) -> sa.Update:
    return sa.update(_OWNER).where(_OWNER.c.epoch == epoch)
