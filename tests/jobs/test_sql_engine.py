"""How a job store connects to a real PostgreSQL server, and for how long it waits for it."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import OperationalError

from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_engine import JobStoreError, connect
from ray_cluster.jobs.store.sql_store import SqlJobStore
from tests.jobs.conftest import PostgresServer


def test_a_statement_that_does_not_end_is_ended(postgres: PostgresServer) -> None:
    url = postgres.url("postgres")
    assert shown(url, "statement_timeout") == "10s"
    # what the URL leaves open is as without it
    url += "?options=-c%20statement_timeout%3D400"
    assert (shown(url, "statement_timeout"), shown(url, "lock_timeout")) == ("400ms", "700ms")
    engine = connect(url)
    with pytest.raises(OperationalError, match="statement timeout"), engine.begin() as connection:
        connection.execute(sa.text("SELECT pg_sleep(30)"))
    engine.dispose()


def test_who_is_cut_off_in_a_transaction_keeps_nothing_locked(
    postgres: PostgresServer,
) -> None:
    url = postgres.create("idle")
    assert shown(url, "idle_in_transaction_session_timeout") == "3s"
    url += "?options=-c%20idle_in_transaction_session_timeout%3D300"
    cut_off, other = SqlJobStore.open(url), SqlJobStore.open(url)
    cut_off.take(Holder.here("c"), None)

    def hang() -> None:
        with cut_off._transaction(writes=True):
            # the owner's row is locked: nobody can take over
            with pytest.raises(JobStoreError, match="lock timeout"):
                other.take(Holder.here("c"), cut_off.owner())
            time.sleep(0.3)
            other.take(Holder.here("c"), other.owner())

    with pytest.raises(JobStoreError):
        hang()
    for store in (cut_off, other):
        store.close()


def test_a_migration_takes_as_long_as_it_takes(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upgrade(config: Config, _revision: str) -> None:
        config.attributes["connection"].execute(sa.text("SELECT pg_sleep(0.8)"))

    url = postgres.create("migrations") + "?options=-c%20statement_timeout%3D400"
    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", upgrade)
        store = SqlJobStore.open(url)
    with pytest.raises(JobStoreError, match="statement timeout"), store._transaction() as found:
        found.execute(sa.text("SELECT pg_sleep(30)"))
    store.close()


def shown(url: str, name: str) -> str:
    """Return what the server says of a parameter of a new connection."""
    engine = connect(url)
    with engine.connect() as connection:
        value = connection.execute(sa.text(f"SHOW {name}")).scalar_one()
    engine.dispose()
    return str(value)
