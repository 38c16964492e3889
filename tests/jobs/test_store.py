"""The contract of a job store, on every kind of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import Job, JobQuery, StoredImage
from ray_cluster.protocol.leases import Endpoint
from ray_cluster.requests import Failure, OutputSpec, Timing
from tests.fakes import image_request, registration

IMAGE = StoredImage("img_1.png", "png", 1234, Timing(queue_s=0.1, denoise_s=1 / 3))


def job(job_id: str = "job_a", created_s: float = 1000.0, **changes: object) -> Job:
    values: dict[str, object] = {
        "client": "alice",
        "requests": (
            image_request(f"{job_id}-0", prompt="a “red” circle\n☃", guidance_scale=0.1 + 0.2),
            image_request(f"{job_id}-1", output=OutputSpec("webp", 80), slo_s=3.0, seed=2**62),
        ),
        "slo_s": 60.0,
        "created_s": created_s,
        "body_digest": "digest",
        "images": (None, None),
    }
    return Job(job_id=job_id, **{**values, **changes})  # type: ignore[arg-type]


def ended(job_id: str) -> Job:
    return job(job_id, state="completed", finished_s=2000.0)


def test_a_job_comes_back_as_it_was(store: SqlJobStore) -> None:
    store.insert(job())
    assert store.get("job_a") == job()
    assert store.get("job_b") is None
    changed = replace(job(), state="running", attempts=3, images=(IMAGE, None), error=None)
    store.update(changed)
    assert store.get("job_a") == changed
    failed = replace(
        changed,
        state="failed",
        finished_s=1002.5,
        error=Failure("job_a-1", "invalid", "too long", "encode", param="prompt"),
    )
    store.update(failed)
    assert store.get("job_a") == failed


def test_it_outlives_its_process(store_url: str) -> None:
    first = SqlJobStore.open(store_url)
    first.insert(job())
    # no close: as after a kill
    second = SqlJobStore.open(store_url)
    assert second.get("job_a") == job()
    second.close()
    first.close()


def test_a_key_names_one_job_of_a_client(store: SqlJobStore) -> None:
    store.insert(job("job_a", idempotency_key="k"))
    with pytest.raises(JobStoreError):
        store.insert(job("job_b", idempotency_key="k"))
    assert store.get("job_b") is None
    store.insert(job("job_c", idempotency_key="k", client="bob"))
    store.insert(job("job_d"))
    store.insert(job("job_e"))
    found = store.find("bob", "k")
    assert found is not None
    assert found.job_id == "job_c"
    assert store.find("carol", "k") is None


def test_an_id_is_given_once(store: SqlJobStore) -> None:
    store.insert(job())
    with pytest.raises(JobStoreError):
        store.insert(job(client="bob"))
    assert store.get("job_a") == job()


def test_what_has_ended_never_changes(store: SqlJobStore) -> None:
    store.insert(job())
    done = replace(job(), state="completed", finished_s=5.0, images=(IMAGE, IMAGE))
    store.update(done)
    store.update(replace(done, state="cancelled", images=()))
    assert store.get("job_a") == done
    store.update(job("job_b"))
    assert store.get("job_b") is None


def test_pages_run_from_new_to_old(store: SqlJobStore) -> None:
    # two of each instant: the order within is fixed all the same
    ids = [f"job_{index}" for index in range(7)]
    for index, job_id in enumerate(ids):
        store.insert(job(job_id, created_s=1000.0 + index // 2))
    store.insert(job("job_x", created_s=1001.0, client="bob"))
    store.update(replace(job("job_3", created_s=1001.0), state="running"))
    seen: list[str] = []
    while page := store.page(JobQuery("alice", limit=3, after=seen[-1] if seen else None)):
        assert len(page) <= 3
        seen += [one.job_id for one in page]
    assert seen == ids[::-1]
    assert [one.job_id for one in store.page(JobQuery("alice", state="running", limit=9))] == [
        "job_3"
    ]
    assert [one.job_id for one in store.page(JobQuery("bob", limit=9))] == ["job_x"]
    assert store.page(JobQuery("alice", limit=9, after="job_x")) == []
    assert store.page(JobQuery("alice", limit=9, after="nobody")) == []


def test_no_more_is_read_than_a_page_holds_and_one_job_more(store: SqlJobStore) -> None:
    requests = (image_request("long", prompt="a" * 200_000),)
    for index in range(6):
        store.insert(job(f"job_{index}", created_s=1000.0 + index, requests=requests))
    for limit, num_read in ((2, 2), (6, 3)):
        page = store.page(JobQuery("alice", limit=limit))
        assert [one.job_id for one in page] == ["job_5", "job_4", "job_3"][:num_read]
    # the connection is free again
    assert store.get("job_0") is not None


def test_what_is_unfinished_is_found_again(store: SqlJobStore) -> None:
    for index, state in enumerate(["completed", "running", "queued", "failed", "cancelled"]):
        one = job(f"job_{index}", created_s=1000.0 - index)
        store.insert(one)
        store.update(replace(one, state=state))  # type: ignore[arg-type]
    assert [one.job_id for one in store.unfinished()] == ["job_2", "job_1"]


def test_old_jobs_are_purged_and_unfinished_ones_never(store: SqlJobStore) -> None:
    for index in range(4):
        store.insert(job(f"job_{index}"))
        store.update(replace(job(f"job_{index}"), state="completed", finished_s=2000.0 + index))
    store.insert(job("job_open"))
    assert [one.job_id for one in store.purge(2003.0, limit=2)] == ["job_0", "job_1"]
    assert [one.job_id for one in store.purge(2003.0, limit=9)] == ["job_2"]
    assert store.purge(2003.0, limit=9) == []
    left = [one.job_id for one in store.page(JobQuery("alice", limit=9))]
    assert left == ["job_open", "job_3"]


def test_a_later_schema_is_refused_and_left_alone(store_url: str, store: SqlJobStore) -> None:
    store.insert(job())
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '999'"))
    with pytest.raises(JobStoreError, match="later version"):
        SqlJobStore.open(store_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '001'"))
    engine.dispose()
    assert store.get("job_a") == job()


def test_a_job_whose_answer_was_lost_is_written_once(store: SqlJobStore) -> None:
    store.insert(job())
    store.insert(job())
    assert [one.job_id for one in store.unfinished()] == ["job_a"]
    with pytest.raises(JobStoreError, match="another job job_a"):
        store.insert(replace(job(), slo_s=1.0))
    store.withdraw(job())
    store.withdraw(job())
    assert store.unfinished() == []
    store.insert(job())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/jobs", "no kind of job store"),
        ("jobs.db", "no kind of job store"),
        ("sqlite://", "must outlive"),
        ("sqlite:///:memory:", "must outlive"),
        ("postgresql://nobody:secret@127.0.0.1:1/jobs", "failed"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, message: str) -> None:
    with pytest.raises(JobStoreError, match=message) as caught:
        SqlJobStore.open(url)
    assert "secret" not in str(caught.value)


def test_a_store_that_fails_says_which(tmp_path: Path) -> None:
    store = SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db")
    engine = sa.create_engine(f"sqlite:///{tmp_path}/jobs.db")
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE jobs"))
    engine.dispose()
    with pytest.raises(JobStoreError, match=r"jobs\.db failed: no such table"):
        store.get("job_a")
    store.close()
    with pytest.raises(JobStoreError, match="folder"):
        SqlJobStore.open("sqlite:////proc/nowhere/jobs.db")


def test_what_is_written_together_is_kept_together(store_url: str, store: SqlJobStore) -> None:
    other = SqlJobStore.open(store_url)
    with store.together():
        for job_id in ("job_a", "job_b"):
            store.insert(job(job_id))
        store.update(replace(job("job_a"), state="completed", finished_s=2000.0))
        assert store.get("job_b") == job("job_b")
        assert other.get("job_b") is None
    kept = other.page(JobQuery("alice", limit=9))
    assert [(one.job_id, one.state) for one in kept] == [
        ("job_b", "queued"),
        ("job_a", "completed"),
    ]

    def fail() -> None:
        with store.together():
            store.insert(job("job_c"))
            store.insert(job("job_b", client="bob"))

    with pytest.raises(JobStoreError):
        fail()
    assert other.get("job_c") is None
    store.insert(job("job_d"))
    assert other.get("job_d") == job("job_d")
    other.close()


def test_a_locked_store_fails_soon_and_can_be_read(store_url: str, store: SqlJobStore) -> None:
    store.insert(job())
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    lock = "BEGIN EXCLUSIVE" if engine.name == "sqlite" else "LOCK TABLE jobs IN SHARE MODE"
    with engine.connect() as connection:
        connection.execute(sa.text(lock))
        for write in (lambda: store.insert(job("job_b")), lambda: store.update(job())):
            with pytest.raises(JobStoreError, match=r"lock"), store.together():
                write()
        assert store.get("job_a") == job()
        connection.rollback()
    engine.dispose()
    store.insert(job("job_b"))
    assert store.get("job_b") == job("job_b")


# a row as versions before the codec wrote it
OLD_REQUEST = {
    "request_id": "img-1", "model": "m", "prompt": "a red circle", "width_px": 64, "height_px": 64,
    "num_steps": 7, "guidance_scale": 5.0, "sampler": "ddim", "seed": 3, "negative_prompt": "",
    "priority": 0, "slo_s": None, "when_late": "accept", "fewest_steps": 5,
    "terms": {
        "asked": "balanced", "num_steps": 20, "fewest_steps": 5,
        "known": {"asked": 20, "balanced": 7, "fast": 5, "balanced_ssim": 0.96, "fast_ssim": 0.9},
    },
    "output": {
        "image_format": "png", "compression": None, "metadata": True, "is_stored": True,
        "num_previews": 0,
    },
    "embeds_guidance": False, "call_id": "call", "job_id": "job_a",
}  # fmt: skip


def test_rows_of_versions_before_the_codec_can_be_read(store_url: str, store: SqlJobStore) -> None:
    one = job("job_a")
    store.insert(one)
    old = {
        "requests": json.dumps([OLD_REQUEST, {**OLD_REQUEST, "terms": None, "fewest_steps": None}]),
        "images": json.dumps(
            [None, {"file_id": "f.png", "image_format": "png", "num_bytes": 3, "timing": None}]
        ),
        "error": json.dumps(
            {"request_id": "img-1", "kind": "error", "message": "no", "stage": "decode",
             "param": None, "attempts": 2}
        ),
    }  # fmt: skip
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE jobs SET requests = :requests, images = :images, error = :error"), old
        )
    engine.dispose()
    found = store.get("job_a")
    assert found is not None
    first, second = found.requests
    assert (first.fidelity, first.fewest_steps, first.terms.known.fast_ssim) == ("balanced", 5, 0.9)
    assert (first.call_id, first.output.is_stored) == ("call", True)
    assert (second.terms, second.fewest_steps, second.fidelity) == (None, None, "exact")
    assert found.images == (None, StoredImage("f.png", "png", 3, None))
    assert found.error == Failure("img-1", "error", "no", "decode", None, 2)
    # written again, it is a row of today
    store.update(found)
    assert store.get("job_a") == found


def test_what_the_controller_saves_is_kept_by_name(store_url: str, store: SqlJobStore) -> None:
    assert store.control() == {}
    store.save_control("plan", '{"version": 1}')
    store.save_control("memory", "☃")
    store.save_control("plan", '{"version": 2}')
    again = SqlJobStore.open(store_url)
    assert again.control() == {"plan": '{"version": 2}', "memory": "☃"}
    again.close()


def test_workers_are_kept_by_pool_without_their_secrets(store_url: str, store: SqlJobStore) -> None:
    first = replace(registration("r1"), pool="sd", endpoint=Endpoint("h:1", "s3cret"), load_s=3.0)
    store.save_worker(first, 1.0)
    store.save_worker(replace(first, replica_id="r2", max_batch=9), 2.0)
    store.save_worker(replace(registration("r3"), pool="dit"), 3.0)
    dit, sd = store.workers()
    assert (dit.pool, sd.pool, sd.max_batch, sd.load_s) == ("dit", "sd", 9, 3.0)
    assert (sd.replica_id, sd.endpoint, sd.profile) == ("", None, first.profile)
    engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        (text,) = connection.execute(
            sa.text("SELECT registration FROM workers WHERE pool = 'sd'")
        ).scalars()
        assert "s3cret" not in text
        # one that another version wrote is as good as none
        connection.execute(sa.text("UPDATE workers SET registration = '{}' WHERE pool = 'sd'"))
    engine.dispose()
    assert [one.pool for one in store.workers()] == ["dit"]
