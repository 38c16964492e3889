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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.jobs import sql_owner
from ray_cluster.jobs.holder import Holder
from ray_cluster.jobs.job_rows import JOB_COLUMNS, changes_of, job_of, may_be_newer, row_of
from ray_cluster.jobs.page_size import until_full
from ray_cluster.jobs.sql_engine import WRITES, JobStoreError, connect, migrate
from ray_cluster.protocol.jobs import FINAL_STATES, Job, JobQuery
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.loras import Lora, LoraFacts

logger = logging.getLogger(__name__)

_JOBS = sa.table("jobs", *map(sa.column, JOB_COLUMNS))
_DAMAGED = sa.table("damaged_jobs", *map(sa.column, ("job_id", "found_s", "reason", "row")))
_BY_AGE = (_JOBS.c.created_s, _JOBS.c.job_id)
_FETCHED_AT_ONCE = 50
_LORAS = sa.table("loras", *map(sa.column, ("lora_id", "is_removed", "lora", "facts")))
_WORKERS = sa.table("workers", *map(sa.column, ("pool", "registered_s", "registration")))

_CONTROL = sa.table("control", *map(sa.column, ("name", "document")))

_LORA: TextCodec[Lora] = TextCodec(Lora)
_FACTS: TextCodec[LoraFacts] = TextCodec(LoraFacts)
_REGISTRATION: TextCodec[Registration] = TextCodec(Registration)


class NothingWritten(JobStoreError):
    """The job store failed before it was to keep anything: nothing of a call is there."""


class JobUnreadable(JobStoreError):
    """A job that a later release has written; others can be read."""


class _OfThread(threading.local):
    """The connection that all calls of this thread share, within :meth:`SqlJobStore.together`."""

    shared: sa.Connection | None = None


class SqlJobStore:
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
        """Connect, and bring the schema to this version.

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
                migrate(connection)
        except JobStoreError:
            engine.dispose()
            raise
        return store

    def owner(self) -> sql_owner.Owner | None:
        """Return who owns the store."""
        with self._transaction() as connection:
            return sql_owner.Owner.read(connection)

    def take(self, holder: Holder, before: sql_owner.Owner | None) -> None:
        """Own the store, in place of whom :meth:`owner` has told.

        From now on every write raises :class:`~.sql_owner.JobStoreTaken` once another has taken it.
        """
        with self._transaction(writes=True) as connection:
            epoch = sql_owner.take(connection, holder, before)
        self._epoch = epoch

    def beat(self) -> None:
        """Show that the owner is alive, as every other write does."""
        with self._transaction(writes=True):
            pass

    def release(self) -> None:
        """Own the store no more."""
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
            # which waits for the end of a transaction that has written the same
            connection.execute(self._new(job).on_conflict_do_nothing())
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.job_id == job.job_id))

    def _new(self, job: Job) -> sqlite.Insert | postgresql.Insert:
        is_sqlite = self._engine.dialect.name == "sqlite"
        insert = sqlite.insert(_JOBS) if is_sqlite else postgresql.insert(_JOBS)
        return insert.values(row_of(job))

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
            return list(connection.execute(ids).scalars())

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
            self.num_damaged -= connection.execute(sa.delete(_DAMAGED).where(old)).rowcount
        return jobs

    @property
    def has_damaged(self) -> bool:
        """Whether a damaged job was found that is not put aside yet."""
        return bool(self._damaged)

    def put_aside(self, now_s: float) -> None:
        """Move the damaged jobs that were found to a table of their own, as they are."""
        with self._transaction(writes=True) as connection:
            for job_id, reason in list(self._damaged.items()):
                is_it = _JOBS.c.job_id == job_id
                row = connection.execute(sa.select(_JOBS).where(is_it)).first()
                if row is not None:
                    text = json.dumps(dict(row._mapping), default=repr)
                    values = {"job_id": job_id, "found_s": now_s, "reason": reason, "row": text}
                    connection.execute(sa.delete(_DAMAGED).where(_DAMAGED.c.job_id == job_id))
                    connection.execute(sa.insert(_DAMAGED).values(values))
                    connection.execute(sa.delete(_JOBS).where(is_it))
            number = sa.select(sa.func.count()).select_from(_DAMAGED)
            self.num_damaged = connection.execute(number).scalar_one()
        self._damaged.clear()

    def save_worker(self, registration: Registration, registered_s: float) -> None:
        """Write how a pool's workers registered last, in place of what there was."""
        # who it was and where it listened is of no use later
        saved = replace(registration, replica_id="", endpoint=None)
        values = {"registered_s": registered_s, "registration": _REGISTRATION.encode(saved)}
        changes = sa.update(_WORKERS).where(_WORKERS.c.pool == registration.pool).values(values)
        with self._transaction(writes=True) as connection:
            if not connection.execute(changes).rowcount:
                row = {"pool": registration.pool, **values}
                connection.execute(sa.insert(_WORKERS).values(row))

    def workers(self) -> list[Registration]:
        """Return how each pool's workers registered last, as far as it can be read."""
        found = []
        with self._transaction() as connection:
            for row in connection.execute(sa.select(_WORKERS).order_by(_WORKERS.c.pool)):
                # one of another version is as good as none: its pool registers again
                with suppress(CodecError):
                    found.append(_REGISTRATION.decode(row.registration))
        return found

    def save_control(self, name: str, document: str) -> None:
        """Write what is saved under a name, in place of what there was."""
        changes = sa.update(_CONTROL).where(_CONTROL.c.name == name).values(document=document)
        with self._transaction(writes=True) as connection:
            if not connection.execute(changes).rowcount:
                row = {"name": name, "document": document}
                connection.execute(sa.insert(_CONTROL).values(row))

    def control(self) -> dict[str, str]:
        """Return what the controller and :class:`KnownKeys` have saved, by name."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(_CONTROL))
            return {row.name: row.document for row in rows}

    def add_lora(self, lora: Lora) -> None:
        """Write a new LoRA."""
        row = {"lora_id": lora.lora_id, "is_removed": False, "lora": _LORA.encode(lora)}
        with self._transaction(writes=True) as connection:
            connection.execute(sa.insert(_LORAS).values(row))

    def note_facts(self, lora_id: str, facts: LoraFacts) -> None:
        """Write what was found out of a LoRA."""
        self._change_lora(lora_id, facts=_FACTS.encode(facts))

    def remove_lora(self, lora_id: str) -> None:
        """Write that a LoRA is to be forgotten once no open request uses it."""
        self._change_lora(lora_id, is_removed=True)

    def _change_lora(self, lora_id: str, **values: Any) -> None:
        changes = sa.update(_LORAS).where(_LORAS.c.lora_id == lora_id).values(values)
        with self._transaction(writes=True) as connection:
            connection.execute(changes)

    def forget_lora(self, lora_id: str) -> None:
        """Delete a LoRA's row."""
        with self._transaction(writes=True) as connection:
            connection.execute(sa.delete(_LORAS).where(_LORAS.c.lora_id == lora_id))

    def loras(self) -> list[tuple[Lora, LoraFacts | None, bool]]:
        """Return every LoRA that can be read, what is known of it, and whether it is removed."""
        found = []
        with self._transaction() as connection:
            for row in connection.execute(sa.select(_LORAS).order_by(_LORAS.c.lora_id)):
                try:
                    facts = None if row.facts is None else _FACTS.decode(row.facts)
                    found.append((_LORA.decode(row.lora), facts, bool(row.is_removed)))
                except CodecError as error:
                    logger.error("the LoRA %s is left alone: %s", row.lora_id, error)
        return found

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
        except CodecError as error:
            job_id, reason = row["job_id"], str(error)
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
