"""Jobs in a SQL database: SQLite in a file, or PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ray_cluster.codec.values import CodecError
from ray_cluster.jobs.migration import MigrationFailed, migrate
from ray_cluster.jobs.store import JobStoreError
from ray_cluster.jobs.stored_forms import ERROR, IMAGES, REGISTRATION, REQUESTS, stored
from ray_cluster.protocol.jobs import FINAL_STATES, Job, JobQuery
from ray_cluster.protocol.leases import Registration

# as the migrations leave it
_JOBS = sa.table(
    "jobs",
    *(
        sa.column(name)
        for name in (
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
        )
    ),
)
_WORKERS = sa.table(
    "workers", *(sa.column(name) for name in ("pool", "registered_s", "registration"))
)
_WRITES = "ray_cluster_writes"
_BACKENDS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
# a server or a file that is away or locked: below the patience of whoever waits for a job
_BUSY_S = 0.7
_POSTGRES = {
    "connect_timeout": 2,
    "tcp_user_timeout": int(1e3 * _BUSY_S),
    "options": f"-c lock_timeout={int(1e3 * _BUSY_S)}",
}


class _OfThread(threading.local):
    """The connection of the calls that this thread keeps together."""

    shared: sa.Connection | None = None


class SqlJobStore:
    """Implements :class:`~ray_cluster.jobs.store.JobStore`; create it with :meth:`open`.

    Any threads may use it; what is kept together is so in one of them.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._name = engine.url.render_as_string(hide_password=True)
        self._of_this_thread = _OfThread()

    @classmethod
    def open(cls, url: str) -> SqlJobStore:
        """Connect, and bring the schema to this version.

        Args:
            url: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or
                ``postgresql://user:password@host/database``.

        Raises:
            JobStoreError: another kind of URL, no such server, or a schema of a later version.
        """
        parsed = _parse(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if is_sqlite:
            _make_folder(parsed)
        options = {} if is_sqlite else {**_POSTGRES, **parsed.query}
        try:
            engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=options)
        except (SQLAlchemyError, ImportError) as error:
            raise JobStoreError(f"cannot use {_shown(parsed)} as a job store: {error}") from error
        if is_sqlite:
            sa.event.listen(engine, "connect", _set_up_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        store = cls(engine)
        try:
            with store._transaction(writes=True) as connection:
                migrate(connection)
        except MigrationFailed as error:
            engine.dispose()
            raise JobStoreError(f"the job store {_shown(parsed)}: {error}") from error
        return store

    def insert(self, job: Job) -> Job:
        """See :meth:`JobStore.insert`."""
        with self._transaction(writes=True) as connection:
            if job.idempotency_key is not None:
                earlier = self._one(connection, _with_key(job.client, job.idempotency_key))
                if earlier is not None:
                    return earlier
            connection.execute(sa.insert(_JOBS).values(_row(job)))
        return job

    def update(self, job: Job) -> None:
        """See :meth:`JobStore.update`."""
        changes = _changes(job)
        with self._transaction(writes=True) as connection:
            connection.execute(
                sa.update(_JOBS)
                .where(_JOBS.c.job_id == job.job_id, _JOBS.c.state.not_in(FINAL_STATES))
                .values(changes)
            )

    def get(self, job_id: str) -> Job | None:
        """See :meth:`JobStore.get`."""
        with self._transaction() as connection:
            return self._one(connection, _JOBS.c.job_id == job_id)

    def find(self, client: str, idempotency_key: str) -> Job | None:
        """See :meth:`JobStore.find`."""
        with self._transaction() as connection:
            return self._one(connection, _with_key(client, idempotency_key))

    def page(self, query: JobQuery) -> list[Job]:
        """See :meth:`JobStore.page`."""
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
            return [self._job(row) for row in connection.execute(rows.limit(query.limit))]

    def unfinished(self) -> list[Job]:
        """See :meth:`JobStore.unfinished`."""
        query = sa.select(_JOBS).where(_JOBS.c.state.not_in(FINAL_STATES))
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(_JOBS.c.created_s, _JOBS.c.job_id))
            return [self._job(row) for row in rows]

    def purge(self, finished_before_s: float, *, limit: int) -> list[Job]:
        """See :meth:`JobStore.purge`."""
        query = sa.select(_JOBS).where(_JOBS.c.finished_s < finished_before_s)
        with self._transaction(writes=True) as connection:
            rows = connection.execute(query.order_by(_JOBS.c.finished_s).limit(limit))
            jobs = [self._job(row) for row in rows]
            _delete(connection, [job.job_id for job in jobs])
        return jobs

    def forget(self, job_ids: Sequence[str]) -> None:
        """See :meth:`JobStore.forget`."""
        with self._transaction(writes=True) as connection:
            _delete(connection, job_ids)

    def keep_worker(self, registration: Registration, registered_s: float) -> None:
        """See :meth:`JobStore.keep_worker`."""
        # who it was and where it listened is nobody's any more
        kept = replace(registration, replica_id="", endpoint=None)
        values = {"registered_s": registered_s, "registration": REGISTRATION.encode(kept)}
        is_pool = _WORKERS.c.pool == registration.pool
        with self._transaction(writes=True) as connection:
            changed = connection.execute(sa.update(_WORKERS).where(is_pool).values(values))
            if not changed.rowcount:
                connection.execute(
                    sa.insert(_WORKERS).values({"pool": registration.pool, **values})
                )

    def workers(self) -> list[Registration]:
        """See :meth:`JobStore.workers`."""
        found = []
        with self._transaction() as connection:
            for row in connection.execute(sa.select(_WORKERS).order_by(_WORKERS.c.pool)):
                # one of another version is as good as none: its pool registers again
                with suppress(CodecError):
                    found.append(REGISTRATION.decode(row.registration))
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """See :meth:`JobStore.together`."""
        with self._transaction(writes=True) as connection:
            self._of_this_thread.shared = connection
            try:
                yield
            finally:
                self._of_this_thread.shared = None

    def close(self) -> None:
        """See :meth:`JobStore.close`."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sa.Connection]:
        try:
            if self._of_this_thread.shared is not None:
                yield self._of_this_thread.shared
                return
            with self._engine.connect() as connection:
                connection.execution_options(**{_WRITES: writes})
                with connection.begin():
                    yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise JobStoreError(f"the job store {self._name} failed: {reason}") from error

    def _one(self, connection: sa.Connection, where: sa.ColumnElement[bool]) -> Job | None:
        row = connection.execute(sa.select(_JOBS).where(where)).first()
        return None if row is None else self._job(row)

    def _job(self, row: sa.Row[Any]) -> Job:
        values = dict(row._mapping)
        try:
            return Job(
                **{
                    **values,
                    "requests": stored(REQUESTS, values["requests"]),
                    "images": stored(IMAGES, values["images"]),
                    "error": stored(ERROR, values["error"]),
                }
            )
        except CodecError as error:
            raise JobStoreError(
                f"the job store {self._name} has a damaged job {values['job_id']}: {error}"
            ) from error


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        driver = _BACKENDS[parsed.drivername]
    except (ArgumentError, KeyError) as error:
        raise JobStoreError(
            f"{url.partition('://')[0]!r} is no kind of job store; allowed: "
            "'sqlite:///folder/jobs.db' and 'postgresql://user:password@host/database'"
        ) from error
    return parsed.set(drivername=driver)


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _make_folder(url: URL) -> None:
    if not url.database or url.database == ":memory:":
        raise JobStoreError("a job store must outlive its process; name a file: sqlite:///jobs.db")
    try:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobStoreError(f"cannot make the folder of {_shown(url)}: {error}") from error


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Python's own transactions begin with the first write
    connection.isolation_level = None
    cursor = connection.cursor()
    # readers never wait for the writer; a commit is on the disk when it returns
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={int(1e3 * _BUSY_S)}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # a transaction that writes after it has read would fail instead of waiting for its turn
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _with_key(client: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(_JOBS.c.client == client, _JOBS.c.idempotency_key == key)


def _delete(connection: sa.Connection, job_ids: Sequence[str]) -> None:
    if job_ids:
        connection.execute(sa.delete(_JOBS).where(_JOBS.c.job_id.in_(job_ids)))


def _row(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "client": job.client,
        "idempotency_key": job.idempotency_key,
        "body_digest": job.body_digest,
        "slo_s": job.slo_s,
        "created_s": job.created_s,
        "requests": REQUESTS.encode(job.requests),
        **_changes(job),
    }


def _changes(job: Job) -> dict[str, Any]:
    return {
        "state": job.state,
        "finished_s": job.finished_s,
        "attempts": job.attempts,
        "images": IMAGES.encode(job.images),
        "error": ERROR.encode(job.error),
    }
