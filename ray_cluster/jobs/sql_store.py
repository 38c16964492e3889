"""The store of durable jobs in a SQL database.

Written by the dispatcher alone. A job takes three writes: accepted, ended, purged; and one for each
image that a cascade defers. What else goes on in between is in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ray_cluster.codec.values import CodecError, TextCodec, is_versioned, plain_of
from ray_cluster.jobs.page_size import until_full
from ray_cluster.jobs.sql_engine import WRITES, JobStoreError, connect, migrate
from ray_cluster.protocol.jobs import FINAL_STATES, Job, JobQuery, StoredImage
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.loras import Lora, LoraFacts
from ray_cluster.protocol.outcomes import Deferred
from ray_cluster.requests import Failure, ImageRequest

T = TypeVar("T")

# as the migrations leave it
_JOB_COLUMNS = (
    "job_id",
    "client",
    "idempotency_key",
    "body_digest",
    "state",
    "slo_s",
    "created_s",
    "finished_s",
    "attempts",
    "requests",
    "images",
    "error",
    "deferred",
)
_JOBS = sa.table("jobs", *map(sa.column, _JOB_COLUMNS))
_LORAS = sa.table("loras", *map(sa.column, ("lora_id", "is_removed", "lora", "facts")))
_WORKERS = sa.table("workers", *map(sa.column, ("pool", "registered_s", "registration")))

_CONTROL = sa.table("control", *map(sa.column, ("name", "document")))

_REQUESTS: TextCodec[tuple[ImageRequest, ...]] = TextCodec(tuple[ImageRequest, ...])
_IMAGES: TextCodec[tuple[StoredImage | None, ...]] = TextCodec(tuple[StoredImage | None, ...])
_DEFERRED: TextCodec[tuple[Deferred, ...]] = TextCodec(tuple[Deferred, ...])
_ERROR: TextCodec[Failure | None] = TextCodec(Failure | None)
_LORA: TextCodec[Lora] = TextCodec(Lora)
_FACTS: TextCodec[LoraFacts] = TextCodec(LoraFacts)
_REGISTRATION: TextCodec[Registration] = TextCodec(Registration)


class _OfThread(threading.local):
    """The connection that all calls of this thread share, within :meth:`SqlJobStore.together`."""

    shared: sa.Connection | None = None


class SqlJobStore:
    """Holds jobs across the death of every process; create it with :meth:`open`.

    Calls block: keep them off event loops. Every method raises :class:`JobStoreError`, and nothing
    else, when the store fails. Any threads may use it.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._name = engine.url.render_as_string(hide_password=True)
        self._of_this_thread = _OfThread()

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

    def insert(self, job: Job) -> None:
        """Write a new job; when this returns, it survives a power failure."""
        with self._transaction(writes=True) as connection:
            connection.execute(sa.insert(_JOBS).values(_row(job)))

    def update(self, job: Job) -> None:
        """Write what changes in a job's life: state, end, attempts, images, error, deferrals.

        A job that has ended is never changed again, and one that is not there is not made.
        """
        is_open = _JOBS.c.state.not_in(FINAL_STATES)
        changes = sa.update(_JOBS).where(_JOBS.c.job_id == job.job_id, is_open)
        with self._transaction(writes=True) as connection:
            connection.execute(changes.values(_changes(job)))

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
        order = sa.tuple_(_JOBS.c.created_s, _JOBS.c.job_id)
        rows = sa.select(_JOBS).where(_JOBS.c.client == query.client)
        if query.state is not None:
            rows = rows.where(_JOBS.c.state == query.state)
        with self._transaction() as connection:
            if query.after is not None:
                last = self._one(connection, _JOBS.c.job_id == query.after)
                if last is None or last.client != query.client:
                    return []
                rows = rows.where(order < (last.created_s, last.job_id))
            rows = rows.order_by(_JOBS.c.created_s.desc(), _JOBS.c.job_id.desc())
            with connection.execute(rows.limit(query.limit)) as found:
                return list(until_full(self._job(dict(row._mapping)) for row in found))

    def unfinished(self) -> list[Job]:
        """Return every job that has not ended, the oldest first."""
        rows = sa.select(_JOBS).where(_JOBS.c.state.not_in(FINAL_STATES))
        with self._transaction() as connection:
            return self._all(connection, rows.order_by(_JOBS.c.created_s, _JOBS.c.job_id))

    def purge(self, finished_before_s: float, *, limit: int) -> list[Job]:
        """Delete jobs that ended before that instant, the oldest first; return them."""
        rows = sa.select(_JOBS).where(_JOBS.c.finished_s < finished_before_s)
        with self._transaction(writes=True) as connection:
            jobs = self._all(connection, rows.order_by(_JOBS.c.finished_s).limit(limit))
            ids = [job.job_id for job in jobs]
            connection.execute(sa.delete(_JOBS).where(_JOBS.c.job_id.in_(ids)))
        return jobs

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
                with suppress(CodecError):
                    facts = None if row.facts is None else _FACTS.decode(row.facts)
                    found.append((_LORA.decode(row.lora), facts, bool(row.is_removed)))
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
        try:
            if self._of_this_thread.shared is not None:
                yield self._of_this_thread.shared
                return
            with self._engine.connect() as connection:
                connection.execution_options(**{WRITES: writes})
                with connection.begin():
                    yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise JobStoreError(f"the job store {self._name} failed: {reason}") from error

    def _one(self, connection: sa.Connection, where: sa.ColumnElement[bool]) -> Job | None:
        found = self._all(connection, sa.select(_JOBS).where(where).limit(1))
        return found[0] if found else None

    def _all(self, connection: sa.Connection, rows: sa.Select[Any]) -> list[Job]:
        return [self._job(dict(row._mapping)) for row in connection.execute(rows)]

    def _job(self, values: dict[str, Any]) -> Job:
        try:
            read = {
                "requests": _stored(_REQUESTS, values["requests"]),
                "images": _stored(_IMAGES, values["images"]),
                "error": _stored(_ERROR, values["error"]),
                "deferred": ()
                if values["deferred"] is None
                else _DEFERRED.decode(values["deferred"]),
            }
        except CodecError as error:
            raise JobStoreError(
                f"the job store {self._name} has a damaged job {values['job_id']}: {error}"
            ) from error
        return Job(**{**values, **read})


def _stored(codec: TextCodec[T], text: str) -> T:
    """Return what a column holds, also where a version before the codec wrote it."""
    plain = plain_of(text)
    return codec.of_plain(plain["value"] if is_versioned(plain) else _renewed(plain))


def _renewed(plain: Any) -> Any:
    """Return plain values with today's fields."""
    if isinstance(plain, list):
        return [_renewed(one) for one in plain]
    if isinstance(plain, dict):
        # a request's terms say the same
        is_request = "prompt" in plain
        return {key: one for key, one in plain.items() if not is_request or key != "fewest_steps"}
    return plain


def _row(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "client": job.client,
        "idempotency_key": job.idempotency_key,
        "body_digest": job.body_digest,
        "slo_s": job.slo_s,
        "created_s": job.created_s,
        "requests": _REQUESTS.encode(job.requests),
        **_changes(job),
    }


def _changes(job: Job) -> dict[str, Any]:
    return {
        "state": job.state,
        "finished_s": job.finished_s,
        "attempts": job.attempts,
        "images": _IMAGES.encode(job.images),
        "error": _ERROR.encode(job.error),
        "deferred": _DEFERRED.encode(job.deferred) if job.deferred else None,
    }
