"""Wakes those who watch open jobs when there is something new to see of theirs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ray_cluster.jobs.open_job import OpenJob
from ray_cluster.protocol.jobs import JobView

# how soon a watcher sees progress that replicas have reported
_CHECK_EVERY_S = 0.1
# jobs that are checked before others have their turn
_AT_ONCE = 20


class _Watched:
    """An open job that somebody watches.

    Attributes:
        version: when it was last checked.
        view: of that version, which all see who waited for it; None before the first one asks.
        changed: set, and replaced by another event, when the version has changed.
    """

    def __init__(self, job: OpenJob, version: str) -> None:
        self.job = job
        self.version = version
        self.view: JobView | None = None
        self.changed = asyncio.Event()
        self.num_watchers = 0


class JobWatchers:
    """Checks each watched job every now and then, however many watch it.

    Args:
        version_of: returns a job's version; it should cost little.
        view_of: shows a job.
    """

    def __init__(
        self, version_of: Callable[[OpenJob], str], view_of: Callable[[OpenJob], JobView]
    ) -> None:
        self._version_of = version_of
        self._view_of = view_of
        self._watched: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, job: OpenJob, seen: str, wait_s: float) -> JobView | None:
        """Return a job once its version is not ``seen``.

        None if it was not from the beginning, or is after ``wait_s``: nobody else has looked.
        """
        if self._version_of(job) != seen:
            return None
        watched = self._watched.setdefault(job.job.job_id, _Watched(job, seen))
        if watched.version != seen:
            # it has changed since the last check, and this one has seen how
            self._check(watched)
        watched.num_watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._check_forever(), name="job watchers")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while watched.version == seen:
                        await watched.changed.wait()
                    return self._shared(watched)
        finally:
            watched.num_watchers -= 1
            if not watched.num_watchers:
                del self._watched[job.job.job_id]
        return None

    def _shared(self, watched: _Watched) -> JobView:
        if watched.view is None:
            watched.view = self._view_of(watched.job)
        return watched.view

    def check(self, job: OpenJob) -> None:
        """Wake the watchers of a job at once if it has changed."""
        if (watched := self._watched.get(job.job.job_id)) is not None:
            self._check(watched)

    def close(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()

    async def _check_forever(self) -> None:
        while self._watched:
            await asyncio.sleep(_CHECK_EVERY_S)
            for number, watched in enumerate(list(self._watched.values()), start=1):
                # who is woken looks at the job, which may be a forecast
                if self._check(watched) or not number % _AT_ONCE:
                    await asyncio.sleep(0)
        self._task = None

    def _check(self, watched: _Watched) -> bool:
        """Wake who watches a job if it has changed; return whether it has."""
        version = self._version_of(watched.job)
        if version == watched.version:
            return False
        watched.version, watched.view = version, None
        watched.changed.set()
        watched.changed = asyncio.Event()
        return True
