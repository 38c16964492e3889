"""A start does not depend on each row of the job store, nor on the result store."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.protocol.jobs import JobQuery
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from tests.jobs.jobs_cell import JobsCell, Replica, job, until

Change = Callable[[str], str]


def later(text: str) -> str:
    return text.replace('"prompt"', '"a_field_of_a_later_release": 1, "prompt"')


def change(folder: Path, job_id: str, how: Change) -> None:
    with sqlite3.connect(folder / "jobs.db") as db:
        (text,) = db.execute("select requests from jobs where job_id = ?", (job_id,)).fetchone()
        db.execute("update jobs set requests = ? where job_id = ?", (how(text), job_id))
    db.close()


class Bucket:
    """The result store, of which nobody can tell what is there while it is away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_away = True
        num_bytes = BlobStore.num_bytes

        def look(store: BlobStore, name: str) -> int | None:
            if self.is_away:
                raise BlobStoreError("the bucket is away")
            return num_bytes(store, name)

        monkeypatch.setattr(BlobStore, "num_bytes", look)


async def with_jobs(folder: Path, *names: str) -> None:
    async with JobsCell(folder) as cell:
        await Replica(cell).register()
        for name in names:
            await cell.create_job(job(name, idempotency_key=name))


async def test_a_damaged_job_is_put_aside_and_counted(tmp_path: Path) -> None:
    await with_jobs(tmp_path, "bad", "good")
    change(tmp_path, "bad", lambda text: text[:50])
    async with JobsCell(tmp_path, epoch=2) as cell:
        replica = await Replica(cell).register()
        assert list(await replica.poll()) == ["good-0"]
        page = await cell.jobs(JobQuery("alice"))
        assert [one.job.job_id for one in page.views] == ["good"]
        assert await cell.job("alice", "bad") is None
        await until(lambda: cell.store.num_damaged == 1)
        assert "1 damaged jobs are put aside" in " ".join(await cell.warnings())
        assert "('reason', 'damaged'),)): 1.0" in str(await cell.metrics("g", ()))
        # its key names another job from now on
        assert (await cell.create_job(job("new", idempotency_key="bad"))).is_new
    async with JobsCell(tmp_path, epoch=3) as cell:
        assert cell.jobs_service.num_open == 2


async def test_a_damaged_job_gives_its_key_back_at_once(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("bad", idempotency_key="k"))
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        await cell.job("alice", "bad", 5.0)
        change(tmp_path, "bad", lambda _: "{")
        assert (await cell.create_job(job("new", idempotency_key="k"))).is_new


async def test_a_job_of_a_later_release_is_left_to_it(tmp_path: Path) -> None:
    await with_jobs(tmp_path, "new", "good")
    change(tmp_path, "new", later)
    async with JobsCell(tmp_path, epoch=2) as cell:
        replica = await Replica(cell).register()
        assert list(await replica.poll()) == ["good-0"]
        assert [one.job.job_id for one in (await cell.jobs(JobQuery("alice"))).views] == ["good"]
        with pytest.raises(JobStoreUnavailable):
            await cell.job("alice", "new")
        # its key is not free: it would be made twice
        with pytest.raises(JobStoreUnavailable):
            await cell.create_job(job("again", idempotency_key="new"))
        warnings = " ".join(await cell.warnings())
        assert "1 jobs of a later release are left alone" in warnings
        assert "cannot be read" not in warnings
    change(tmp_path, "new", lambda text: text.replace('"a_field_of_a_later_release": 1, ', ""))
    async with JobsCell(tmp_path, epoch=3) as cell:
        assert {one.job.job_id for one in (await cell.jobs(JobQuery("alice"))).views} == {
            "new",
            "good",
        }
        assert cell.jobs_service.num_open == 2


async def test_a_result_store_that_is_away_delays_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.restoring._RETRY_S", (0.02,))
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        for name in ("a", "b", "c"):
            await cell.create_job(job(name, num_images=2))
        leases = await replica.poll()
        # an image that is there, and nobody knows
        cell.results.put(leases["a-0"].request.file_id, b"image")
    bucket = Bucket(monkeypatch)
    later_one = JobsCell(tmp_path, epoch=2)
    later_one.waits = False
    async with later_one as cell:
        replica = await Replica(cell).register()
        states = {
            one.job.job_id: one.job.state for one in (await cell.jobs(JobQuery("alice"))).views
        }
        assert states == dict.fromkeys("abc", "queued")
        assert "the result store cannot be read" in " ".join(await cell.warnings())
        # new ones are made, and old ones are cancelled
        assert (await cell.create_job(job("new"))).is_new
        assert list(await replica.poll()) == ["new-0"]
        view = await cell.cancel_job("alice", "b")
        assert view is not None
        assert view.job.state == "cancelled"
        bucket.is_away = False
        await until(cell.restored.is_set)
        await asyncio.sleep(0.1)
        assert sorted(await replica.poll()) == ["a-1", "c-0", "c-1", "new-0"]
        assert not any("result store" in one for one in await cell.warnings())


async def test_what_is_open_in_the_store_alone_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.service._RECONCILE_EVERY_S", 0.1)
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        cell.store.insert(job("stranger"))
        await until(lambda: cell.jobs_service.num_open == 1)
        await until(lambda: cell.core.num_waiting == 1)
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        view = await cell.job("alice", "stranger", 5.0)
        assert view is not None
        assert view.job.state == "completed"


class LostAnswers:
    """Loses the answer to commits: they are applied, and whoever waits has an error."""

    def __init__(self, cell: JobsCell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        inner = cell.store._transaction

        def commit(*, writes: bool = False) -> object:
            return _Losing(inner(writes=writes), self, is_outer=self.is_outer(cell, writes=writes))

        monkeypatch.setattr(cell.store, "_transaction", commit)

    @staticmethod
    def is_outer(cell: JobsCell, *, writes: bool) -> bool:
        return writes and cell.store._of_this_thread.shared is None


class _Losing:
    def __init__(self, inner: object, answers: LostAnswers, *, is_outer: bool) -> None:
        self._inner, self._answers, self._is_outer = inner, answers, is_outer

    def __enter__(self) -> object:
        return self._inner.__enter__()  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> object:
        result = self._inner.__exit__(*error)  # type: ignore[attr-defined]
        if self._is_outer and self._answers.left and error[0] is None:
            self._answers.left -= 1
            raise JobStoreError("the server has closed the connection")
        return result


@pytest.mark.parametrize("num_lost", [1, 3, 50])
async def test_a_job_whose_written_row_was_not_answered_is_accepted_or_certainly_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._RETRY_S", (0.02,))
    async with JobsCell(tmp_path) as cell:
        await Replica(cell).register()
        answers = LostAnswers(cell, monkeypatch)
        await asyncio.sleep(0.2)
        answers.left = num_lost
        jobs = [job(f"j{number}", idempotency_key=f"k{number}") for number in range(20)]
        created = await asyncio.gather(*map(cell.create_job, jobs), return_exceptions=True)
        accepted = {one.view.job.job_id for one in created if hasattr(one, "view") and one.view}
        assert num_lost > 1 or len(accepted) == 20
        answers.left = 0
        # a call with the same key is the same job, or a new one that is made
        again = [
            await cell.create_job(job(f"again{number}", idempotency_key=f"k{number}"))
            for number in range(20)
        ]
        for number, one in enumerate(again):
            assert one.view is not None
            assert one.is_new != (f"j{number}" in accepted)
            assert cell.jobs_service._open.get(one.view.job.job_id) is not None
        await until(lambda: not cell.jobs_service._creation._doubtful)
        assert len(cell.store.unfinished()) == cell.jobs_service.num_open == 20
        assert cell.core.num_waiting == 20
    async with JobsCell(tmp_path, epoch=2) as later_one:
        assert later_one.core.num_waiting == 20


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b'{"version": 1, "value": []}',
        b"[" * 100_000,
        b'{"version": 1, "value": [{"request_id": "a", "later": 36893488147419103232}]}',
    ],
    ids=["no UTF-8", "no images", "deep", "a large number"],
)
async def test_no_text_of_a_row_stops_a_start_a_page_or_a_sweep(
    tmp_path: Path, text: bytes
) -> None:
    await with_jobs(tmp_path, "bad", "good")
    db = sqlite3.connect(tmp_path / "jobs.db")
    with db:
        db.execute("update jobs set requests = cast(? as text) where job_id = 'bad'", (text,))
        db.execute("insert into workers values ('p', 1.0, cast(? as text))", (text,))
    db.close()
    async with JobsCell(tmp_path, epoch=2) as cell:
        assert [one.job.job_id for one in (await cell.jobs(JobQuery("alice"))).views] == ["good"]
        await cell.jobs_service._sweeper.sweep()
        assert (cell.core.num_waiting, cell.jobs_service.num_open) == (1, 1)


async def test_a_state_of_a_later_release_is_not_made_anew(tmp_path: Path) -> None:
    await with_jobs(tmp_path, "j")
    db = sqlite3.connect(tmp_path / "jobs.db")
    with db:
        db.execute("update jobs set state = 'expired'")
    db.close()
    async with JobsCell(tmp_path, epoch=2) as cell:
        assert cell.jobs_service.num_open == 0
        assert cell.store.newer == {"j"}


async def test_a_replica_keeps_what_it_makes_until_it_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.restoring._RETRY_S", (0.02,))
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        await replica.poll()
    bucket = Bucket(monkeypatch)
    later_one = JobsCell(tmp_path, epoch=2)
    later_one.waits = False
    async with later_one as cell:
        replica.cell = cell
        await replica.register()
        # it names the image, and is not told to drop it
        assert list(await replica.poll()) == ["j-0"]
        bucket.is_away = False
        await until(cell.restored.is_set)
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        view = await cell.job("alice", "j", 5.0)
        assert view is not None
        assert (view.job.state, view.job.attempts) == ("completed", 1)


async def test_a_job_that_is_cancelled_often_before_it_is_looked_up_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await with_jobs(tmp_path, "j")
    Bucket(monkeypatch)
    later_one = JobsCell(tmp_path, epoch=2)
    later_one.waits = False
    async with later_one as cell:
        await asyncio.gather(*(cell.cancel_job("alice", "j") for _ in range(20)))
        view = await cell.job("alice", "j", 5.0)
        assert view is not None
        assert view.job.state == "cancelled"
    assert sum("job_ended" in one.message for one in caplog.records) <= 1
