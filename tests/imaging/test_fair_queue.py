"""Whose job runs next: nobody keeps others waiting for more than the job that runs."""

from __future__ import annotations

import pytest

from ray_cluster.imaging.processes.fair_queue import LEAST_JOB_BYTES, Entry, FairQueue, QueueFull

MIB = 1 << 20


class Runs:
    """A queue, and the jobs of it that run."""

    def __init__(self, num_places: int, max_bytes: int | None = None) -> None:
        self.queue: FairQueue[str] = FairQueue(num_places, max_bytes)
        self.running: list[Entry[str]] = []
        self.began: list[str] = []

    def put(self, client: str, num_jobs: int) -> None:
        for _ in range(num_jobs):
            self.queue.put(client, client)
        self._start()

    def end(self, client: str, cost: float = 1.0) -> None:
        """End the job of a client that has run longest."""
        entry = next(one for one in self.running if one.client == client)
        self.running.remove(entry)
        self.queue.end(entry, cost)
        self._start()

    def _start(self) -> None:
        while (entry := self.queue.take()) is not None:
            self.running.append(entry)
            self.began.append(entry.job)


@pytest.mark.parametrize("num_places", [2, 3, 4])
def test_a_client_never_has_the_last_place(num_places: int) -> None:
    runs = Runs(num_places)
    runs.put("many", 20)
    assert runs.began == ["many"] * (num_places - 1)
    # whoever comes has it at once
    runs.put("one", 1)
    assert runs.began[-1] == "one"
    # and it stays free for the next
    runs.end("one")
    assert len(runs.running) == num_places - 1


def test_with_one_place_a_job_waits_for_one_of_another_client_at_most() -> None:
    runs = Runs(1)
    runs.put("many", 8)
    runs.put("one", 1)
    runs.end("many")
    assert runs.began == ["many", "one"]


def test_jobs_of_the_same_cost_alternate() -> None:
    runs = Runs(1)
    runs.put("a", 6)
    runs.put("b", 3)
    runs.put("c", 3)
    while runs.running:
        runs.end(runs.running[0].client)
    assert sorted(runs.began[:3]) == sorted(runs.began[3:6]) == ["a", "b", "c"]
    assert sorted(runs.began[6:9]) == ["a", "b", "c"]
    assert runs.queue.is_idle


def test_a_client_of_dear_jobs_waits_for_as_many_cheap_ones() -> None:
    runs = Runs(1)
    runs.put("dear", 3)
    runs.put("cheap", 12)
    while runs.running:
        client = runs.running[0].client
        runs.end(client, 5.0 if client == "dear" else 1.0)
    second = runs.began.index("dear", 1)
    assert runs.began[1:second].count("cheap") >= 5


def test_a_client_that_comes_late_owes_nothing_and_is_owed_nothing() -> None:
    runs = Runs(1)
    runs.put("old", 4)
    runs.end("old", 100.0)
    runs.put("new", 50)
    runs.put("old", 10)
    begun = len(runs.began)
    for _ in range(8):
        runs.end(runs.running[0].client)
    assert runs.began[begun : begun + 8].count("old") in {3, 4, 5}


def test_what_waits_is_bounded_and_each_client_has_its_part() -> None:
    queue: FairQueue[str] = FairQueue(1, 8 * MIB)
    entries = [queue.put("many", "job", 2 * MIB) for _ in range(4)]
    with pytest.raises(QueueFull, match="10485760 bytes, of 8388608 that 1 clients share"):
        queue.put("many", "job", 2 * MIB)
    queue.put("other", "job", 4 * MIB)
    with pytest.raises(QueueFull):
        queue.put("other", "job", 1)
    # running ones count, and those that end or are given up do not
    taken = queue.take()
    assert taken is entries[0]
    queue.end(taken, 1.0)
    queue.drop(entries[1])
    queue.drop(entries[1])
    queue.drop(entries[2])
    queue.put("other", "job", 1)


def test_the_number_of_jobs_is_bounded_though_they_hold_nothing() -> None:
    queue: FairQueue[str] = FairQueue(1, 4 * LEAST_JOB_BYTES)
    for _ in range(4):
        queue.put("many", "job")
    with pytest.raises(QueueFull):
        queue.put("many", "job")
    queue.put("other", "job")


def test_a_job_that_runs_is_not_dropped() -> None:
    queue: FairQueue[str] = FairQueue(1, None)
    entry = queue.put("a", "job")
    assert queue.take() is entry
    queue.drop(entry)
    assert not queue.is_idle
    queue.end(entry, 1.0)
    assert queue.is_idle
