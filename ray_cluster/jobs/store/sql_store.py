"""The store of durable jobs in a SQL database.

Written by the dispatcher alone, its owner. A job takes three writes: accepted, ended, purged; and
one for each image that a cascade defers. What else goes on in between is in memory.

A row that cannot be read keeps no other from being read. One of a later release is left alone; a
damaged one is put aside, with all that is left of it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from ray_cluster.jobs.page_size import until_full
from ray_cluster.jobs.store import sql_owner
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.job_rows import (
    JOB_COLUMNS,
    UNREADABLE,
    changes_of,
    job_of,
    may_be_newer,
    row_of,
)
from ray_cluster.jobs.store.small_tables import SmallTables, insert_into
from ray_cluster.jobs.store.sql_engine import (
    WRITES,
    JobStoreError,
    JobUnreadable,
    NothingWritten,
    connect,
    migrate,
)
from ray_cluster.protocol.jobs import FINAL_STATES, Job, JobQuery

logger = logging.getLogger(__name__)

_JOBS = sa.table("jobs", *map(sa.column, JOB_COLUMNS))
_DAMAGED = sa.table("damaged_jobs", *map(sa.column, ("job_id", "found_s", "reason", "row")))
_BY_AGE = (_JOBS.c.created_s, _JOBS.c.job_id)
_FETCHED_AT_ONCE = 50


class _OfThread(threading.local):
    """The connection that all calls of this thread share, within :meth:`SqlJobStore.together`."""

    shared: sa.Connection | None = None


class SqlJobStore(SmallTables):
    """Holds jobs across the death of every process; create it with :meth:`open`.

    Calls block: keep them off event loops. Every method raises :class:`JobStoreError`, and nothing
    else, when the store fails: with :class:`NothingWritten` nothing was written, with others that
    is not known, as the answer to a commit may be lost. Any threads may use it.

    Attributes:
        newer: ids of jobs that only a later release can read.
        num_damaged: jobs that were put aside.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._name = engine.url.render_as_string(hide_password=True)
        self._of_this_thread = _OfThread()
        self._epoch: int | None = None
        # jobs that cannot be read, as far as they were looked at
        self.newer: set[str] = set()
        self._damaged: dict[str, str] = {}
        self.num_damaged = 0

    @classmethod
    def open(cls, url: str) -> Self:
        """Connect, and bring the schema of a new store to this version.

        Args:
            url: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or
                ``postgresql://user:password@host/database``.

        Raises:
            JobStoreError: another kind of URL, no such server, or a schema of a later version.
        """
        engine = connect(url)
        store = cls(engine)
        try:
            with store._transaction(writes=True) as connection:
                # of a store that has an owner, the next owner migrates the schema
                migrate(connection, only_check=sql_owner.is_there(connection))
        except JobStoreError:
            engine.dispose()
            raise
        return store

    def owner(self) -> sql_owner.Owner | None:
        """Return who owns the store."""
        with self._transaction() as connection:
            return sql_owner.Owner.read(connection)

    def take(self, holder: Holder, before: sql_owner.Owner | None, service: str = "") -> None:
        """Own the store, in place of whom :meth:`owner` has told; bring its schema to this version.

        Args:
            service: whose dispatchers of later cells may ask for it; empty for nobody's.

        From now on every write raises :class:`~.sql_owner.JobStoreTaken` once another has taken it.
        """
        with self._transaction(writes=True) as connection:
            epoch = sql_owner.take(connection, holder, before)
            migrate(connection)
            sql_owner.offer(connection, epoch, holder.cell, service, before)
        self._epoch = epoch

    def ask(self, owner: sql_owner.Owner, cell: str) -> None:
        """Ask the owner of the store for it, as a dispatcher of another cell of its service."""
        with self._transaction(writes=True) as connection:
            sql_owner.ask(connection, owner.epoch, cell)

    def beat(self) -> str:
        """Show that the owner is alive, as every other write does; return which cell's dispatcher
        asks for the store."""
        with self._transaction(writes=True) as connection:
            return "" if self._epoch is None else sql_owner.wanted_by(connection, self._epoch)

    def release(self) -> None:
        """Own the store no more; from now on every write raises as if another had taken it."""
        if self._epoch is not None:
            with self._transaction(writes=True) as connection:
                sql_owner.release(connection, self._epoch)

    def insert(self, job: Job) -> None:
        """Write a new job; when this returns, it survives a power failure.

        Nothing is changed if it is there: an earlier call's answer was lost.
        """
        with self._transaction(writes=True) as connection:
            new = self._new(job).on_conflict_do_nothing(index_elements=["job_id"])
            # the number of rows is not known of every driver
            if connection.execute(new.returning(_JOBS.c.job_id)).first() is None:
                there = self._one(connection, _JOBS.c.job_id == job.job_id)
                if there is None or row_of(there) != row_of(job):
                    raise JobStoreError(f"there is another job {job.job_id} in {self._name}")

    def withdraw(self, job: Job) -> None:
        """See to it that a job is not there, though a lost call may have written it, or yet may."""
        with self._transaction(writes=True) as connection:
            # it waits for the end of a transaction that has written the same
            connection.execute(self._new(job).on_conflict_do_nothing())
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.job_id == job.job_id))

    def _new(self, job: Job) -> sqlite.Insert | postgresql.Insert:
        return insert_into(_JOBS, self._engine.dialect.name).values(row_of(job))

    def update(self, job: Job) -> None:
        """Write what changes in a job's life: state, end, attempts, images, error, deferrals.

        A job that has ended is never changed again, and one that is not there is not made.
        """
        is_open = _JOBS.c.state.not_in(FINAL_STATES)
        changes = sa.update(_JOBS).where(_JOBS.c.job_id == job.job_id, is_open)
        with self._transaction(writes=True) as connection:
            connection.execute(changes.values(changes_of(job)))

    def get(self, job_id: str) -> Job | None:
        """Return a job."""
        with self._transaction() as connection:
            return self._one(connection, _JOBS.c.job_id == job_id)

    def find(self, client: str, idempotency_key: str) -> Job | None:
        """Return the client's job with that key."""
        is_named = (_JOBS.c.client == client) & (_JOBS.c.idempotency_key == idempotency_key)
        with self._transaction() as connection:
            return self._one(connection, is_named)

    def page(self, query: JobQuery) -> list[Job]:
        """Return a client's jobs, the newest first; none after an unknown job.

        No more than one job more than a page may hold (:mod:`~ray_cluster.jobs.page_size`).
        """
        order = sa.tuple_(*_BY_AGE)
        rows = sa.select(_JOBS).where(_JOBS.c.client == query.client)
        if query.state is not None:
            rows = rows.where(_JOBS.c.state == query.state)
        with self._transaction() as connection:
            if query.after is not None:
                last = self._one(connection, _JOBS.c.job_id == query.after)
                if last is None or last.client != query.client:
                    return []
                rows = rows.where(order < (last.created_s, last.job_id))
            rows = rows.order_by(*(column.desc() for column in _BY_AGE))
            with self._readable(connection, rows) as found:
                return list(until_full(islice(found, query.limit)))

    def unfinished(self) -> list[Job]:
        """Return every job that has not ended and can be read, the oldest first."""
        rows = sa.select(_JOBS).where(_JOBS.c.state.not_in(FINAL_STATES)).order_by(*_BY_AGE)
        with self._transaction() as connection, self._readable(connection, rows) as found:
            return list(found)

    def unfinished_ids(self) -> list[str]:
        """Return the ids of all jobs that have not ended."""
        ids = sa.select(_JOBS.c.job_id).where(_JOBS.c.state.not_in(FINAL_STATES))
        with self._transaction() as connection:
            return list(connection.scalars(ids))

    def purge(self, finished_before_s: float, *, limit: int) -> list[Job]:
        """Delete jobs that ended before that instant, the oldest first; return them.

        Those that were put aside before it go, too.
        """
        rows = sa.select(_JOBS).where(_JOBS.c.finished_s < finished_before_s)
        with self._transaction(writes=True) as connection:
            with self._readable(connection, rows.order_by(_JOBS.c.finished_s)) as found:
                jobs = list(islice(found, limit))
            ids = [job.job_id for job in jobs]
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.job_id.in_(ids)))
            old = _DAMAGED.c.found_s < finished_before_s
            connection.execute(sa.delete(_DAMAGED).where(old))
            num_damaged = _num_of(connection, _DAMAGED)
        self.num_damaged = num_damaged
        return jobs

    @property
    def has_damaged(self) -> bool:
        """Whether a damaged job was found that is not put aside yet."""
        return bool(self._damaged)

    def put_aside(self, now_s: float, spared: Container[str] = ()) -> None:
        """Move the damaged jobs that were found to a table of their own, as they are.

        Args:
            spared: jobs that are whole in memory: their ends will be written over their rows.
        """
        found = {one: reason for one, reason in [*self._damaged.items()] if one not in spared}
        with self._transaction(writes=True) as connection:
            for job_id, reason in found.items():
                is_it = _JOBS.c.job_id == job_id
                row = connection.execute(sa.select(_JOBS).where(is_it)).first()
                if row is not None:
                    text = json.dumps(dict(row._mapping), default=repr)
                    values = {"job_id": job_id, "found_s": now_s, "reason": reason, "row": text}
                    connection.execute(sa.delete(_DAMAGED).where(_DAMAGED.c.job_id == job_id))
                    connection.execute(sa.insert(_DAMAGED).values(values))
                    connection.execute(sa.delete(_JOBS).where(is_it))
            num_damaged = _num_of(connection, _DAMAGED)
        self.num_damaged = num_damaged
        for job_id in found:
            self._damaged.pop(job_id, None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one transaction of what this thread calls within it."""
        with self._transaction(writes=True) as connection:
            self._of_this_thread.shared = connection
            try:
                yield
            finally:
                self._of_this_thread.shared = None

    def close(self) -> None:
        """Release files and connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        kind: type[JobStoreError] = NothingWritten
        try:
            if self._of_this_thread.shared is not None:
                yield self._of_this_thread.shared
                return
            with self._engine.connect() as connection:
                connection.execution_options(**{WRITES: writes})
                with connection.begin():
                    if writes and self._epoch is not None:
                        sql_owner.fence(connection, self._epoch)
                    yield connection
                    kind = JobStoreError
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise kind(f"the job store {self._name} failed: {reason}") from error

    def _one(self, connection: sa.Connection, where: sa.ColumnElement[bool]) -> Job | None:
        row = connection.execute(sa.select(_JOBS).where(where).limit(1)).first()
        if row is None:
            return None
        job = self._job(dict(row._mapping))
        if job is None and row.job_id in self.newer:
            raise JobUnreadable(
                f"the job {row.job_id} of the job store {self._name} is of a later release"
            )
        return job

    @contextmanager
    def _readable(self, connection: sa.Connection, rows: sa.Select[Any]) -> Iterator[Iterator[Job]]:
        """Give the jobs that can be read, of which no more are fetched than are asked for."""
        options = {"yield_per": _FETCHED_AT_ONCE}
        with connection.execute(rows, execution_options=options) as found:
            jobs = (self._job(dict(row._mapping)) for row in found)
            yield (job for job in jobs if job is not None)

    def _job(self, row: dict[str, Any]) -> Job | None:
        """Return a row's job; None, and a note, if it cannot be read."""
        try:
            return job_of(row)
        except UNREADABLE as error:
            # whatever the text is made of, it is one row's
            job_id, reason = row["job_id"], ascii(str(error))
        if job_id not in self.newer and job_id not in self._damaged:
            is_newer = may_be_newer(row)
            what = (
                "of a later release: it is left alone" if is_newer else "damaged: it is put aside"
            )
            logger.error("the job %s of the job store is %s (%s)", job_id, what, reason)
            if is_newer:
                self.newer.add(job_id)
            else:
                self._damaged[job_id] = reason
        return None


def _num_of(connection: sa.Connection, table: sa.TableClause) -> int:
    return connection.scalars(sa.select(sa.func.count()).select_from(table)).one()
