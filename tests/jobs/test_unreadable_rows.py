"""Rows of a job store that this release cannot read, and schemas that it may not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.job_rows import row_of
from ray_cluster.jobs.store.sql_engine import JobUnreadable
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import JobQuery
from tests.jobs.test_store import ended, job


def alter(store_url: str, job_id: str, **columns: str) -> None:
    """Write columns of a job as somebody else might."""
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        for name, text in columns.items():
            change = sa.text(f"UPDATE jobs SET {name} = :text WHERE job_id = :job_id")
            connection.execute(change, {"text": text, "job_id": job_id})
    engine.dispose()


def test_only_an_owner_changes_the_schema_of_a_store_that_had_one(
    store_url: str, store: SqlJobStore
) -> None:
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '005'"))
    SqlJobStore.open(store_url).close()
    with engine.begin() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "005"
        for name in ("owner", "damaged_jobs"):
            connection.execute(sa.text(f"DROP TABLE {name}"))
    other = SqlJobStore.open(store_url)
    other.take(Holder.here("c"), None)
    other.close()
    with engine.begin() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "006"
    engine.dispose()


DAMAGES = ["[{}]", "", '{"version": 1, "value": [{"prompt": "a"}]}', '{"version": 1, "val']


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_row_is_put_aside_and_keeps_no_other_from_being_read(
    store_url: str, store: SqlJobStore, text: str
) -> None:
    for name in ("a", "b"):
        store.insert(replace(job(), job_id=name, idempotency_key=name))
        store.insert(ended(f"old-{name}"))
    for name in ("a", "old-a"):
        alter(store_url, name, requests=text)
    assert [one.job_id for one in store.unfinished()] == ["b"]
    assert {one.job_id for one in store.page(JobQuery("alice", limit=9))} == {"b", "old-b"}
    # those that are left out make no page shorter
    assert len(store.page(JobQuery("alice", limit=2))) == 2
    assert (store.get("a"), store.find("alice", "a")) == (None, None)
    assert [one.job_id for one in store.purge(1e9, limit=9)] == ["old-b"]
    assert store.has_damaged
    store.put_aside(2e9)
    assert (store.has_damaged, store.num_damaged, store.unfinished_ids()) == (False, 2, ["b"])
    # its key is free, and what there is of it goes as others do
    store.insert(replace(job(), job_id="c", idempotency_key="a"))
    again = SqlJobStore.open(store_url)
    again.put_aside(2e9)
    assert again.num_damaged == 2
    again.purge(2e9 + 1, limit=9)
    assert again.num_damaged == 0
    again.close()


def test_a_row_of_a_later_release_is_left_alone(store_url: str, store: SqlJobStore) -> None:
    for name in ("a", "b"):
        store.insert(replace(job(), job_id=name, idempotency_key=name))
        store.insert(ended(f"old-{name}"))
    written = row_of(job())
    later = {
        "a": {"requests": written["requests"].replace('"prompt"', '"later": 1, "prompt"')},
        "old-a": {"error": '{"version": 2, "value": {"what": "is to come"}}'},
    }
    for name, columns in later.items():
        alter(store_url, name, **columns)
    assert [one.job_id for one in store.unfinished()] == ["b"]
    assert [one.job_id for one in store.purge(1e9, limit=9)] == ["old-b"]
    with pytest.raises(JobUnreadable, match=r"the job a of the job store .* later release"):
        store.get("a")
    with pytest.raises(JobUnreadable):
        store.find("alice", "a")
    assert (store.has_damaged, store.newer) == (False, {"a", "old-a"})
    store.put_aside(2e9)
    assert sorted(store.unfinished_ids()) == ["a", "b"]
    # and read by that release
    alter(store_url, "a", requests=written["requests"])
    assert {one.job_id for one in store.unfinished()} == {"a", "b"}
