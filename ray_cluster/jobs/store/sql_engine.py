"""Connects to a job store's database, SQLite in a file or PostgreSQL, and migrates its schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ray_cluster.errors import RayClusterError

# an option of a connection: whether its transaction writes
WRITES = "ray_cluster_writes"
_BACKENDS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
_MIGRATIONS = Path(__file__).with_name("migrations")
# a server or a file that is away or locked: below the patience of whoever waits for a job
_BUSY_S = 0.7
# a statement that a server has begun and does not end, on a disk that hangs, say: the one thread
# that reads or writes waits for it. A start, which reads all open jobs, takes a few seconds
_STATEMENT_S = 10.0
_IDLE_S = 3.0
_POSTGRES = {"connect_timeout": 2, "tcp_user_timeout": int(1e3 * _BUSY_S)}
_POSTGRES_OPTIONS = (
    f"-c lock_timeout={int(1e3 * _BUSY_S)}",
    f"-c statement_timeout={int(1e3 * _STATEMENT_S)}",
    # a client that the network has cut off must not keep what it has locked: the owner's row
    f"-c idle_in_transaction_session_timeout={int(1e3 * _IDLE_S)}",
)


class JobStoreError(RayClusterError):
    """The job store can't be opened, read or written; the message names the store."""


class NothingWritten(JobStoreError):
    """The job store failed before it was to keep anything: nothing of a call is there."""


class JobUnreadable(JobStoreError):
    """A job that a later release has written; others can be read."""


def connect(url: str) -> sa.Engine:
    """Return an engine for a job store's URL; no connection is made yet.

    Raises:
        JobStoreError: another kind of URL, or its driver is not installed.
    """
    parsed = _parse(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite:
        _make_folder(parsed)
    options = {} if is_sqlite else _postgres_options(parsed)
    try:
        engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=options)
    except (SQLAlchemyError, ImportError) as error:
        raise JobStoreError(f"cannot use {_shown(parsed)} as a job store: {error}") from error
    if is_sqlite:
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def migrate(connection: sa.Connection, *, only_check: bool = False) -> None:
    """Run the migrations that a database lacks, in the connection's transaction.

    However long they take: one that rewrites a large table would never end otherwise.

    Args:
        only_check: leave the schema as it is.

    Raises:
        JobStoreError: a later version of this program has written the database.
    """
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.exec_driver_sql(f"SET LOCAL {name} = 0")
    try:
        if only_check:
            present = MigrationContext.configure(connection).get_current_revision()
            ScriptDirectory.from_config(config).get_revisions([present])
        else:
            command.upgrade(config, "head")
    except CommandError as error:
        raise JobStoreError(
            f"the job store {_shown(connection.engine.url)}: its schema is of a later version of "
            "ray-cluster; run that version, or name another job store"
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


def _postgres_options(url: URL) -> dict[str, Any]:
    """Return how to connect: what the URL says goes before what is set here."""
    own = url.normalized_query.get("options", ())
    # of two values of one parameter, the server takes the later
    return {**_POSTGRES, **url.query, "options": " ".join((*_POSTGRES_OPTIONS, *own))}


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
    # a damaged text is its row's damage, and no other's
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")
    cursor = connection.cursor()
    # readers never wait for the writer; a commit is on the disk when it returns
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={int(1e3 * _BUSY_S)}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # a transaction that writes after it has read would fail instead of waiting for its turn
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
