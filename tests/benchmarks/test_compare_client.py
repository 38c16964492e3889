import json
import os
import time
from collections import namedtuple

import pytest

from benchmarks.serving import processes
from benchmarks.serving.compare.client import Answer, call_all
from benchmarks.serving.compare.client_run import run_client
from benchmarks.serving.compare.contenders import Counts
from benchmarks.serving.compare.outcomes import CallOutcome, account, figures_of, outcome_of
from benchmarks.serving.compare.settings import Shape
from benchmarks.serving.compare.traces import Planned
from benchmarks.serving.processes import CpuMeter
from tests.benchmarks.comparing import image_reply, slow_server

ASKED = Planned(0.0, Shape(64, 64, 10, 2.0), "a circle", seed=1, slo_s=1.0)


async def test_arrivals_do_not_wait_for_slow_answers() -> None:
    calls = [(0.02 * index, {"number": index}) for index in range(20)]
    async with slow_server(0.6) as url:
        answers, usage = await call_all(url, calls, timeout_s=20)
    assert [json.loads(answer.body)["number"] for answer in answers] == list(range(20))
    # 12 s, would they wait for each other; some of the time is left to a busy machine
    assert usage.wall_s < 4
    assert all(0.6 <= (answer.latency_s or 0) < 3 for answer in answers)


async def test_latency_counts_from_the_planned_instant_and_not_from_sending() -> None:
    # due a second before the client begins
    async with slow_server(0.1) as url:
        [answer], _ = await call_all(url, [(-1.3, {})], timeout_s=20)
    assert answer.late_send_s >= 0.9
    assert answer.latency_s is not None
    assert answer.latency_s >= answer.late_send_s + 0.1


async def test_call_without_an_answer_is_lost_and_says_why() -> None:
    async with slow_server(0.0, cuts_off=True) as url:
        [answer], _ = await call_all(url, [(0.0, {})], timeout_s=20)
    outcome = outcome_of(ASKED, answer)
    assert (outcome.fate, outcome.latency_s) == ("lost", None)
    assert "RemoteProtocolError" in outcome.problem or "ReadError" in outcome.problem


async def test_answer_that_does_not_come_in_time_is_lost() -> None:
    async with slow_server(5.0) as url:
        [answer], _ = await call_all(url, [(0.0, {})], timeout_s=0.2)
    assert outcome_of(ASKED, answer).fate == "lost"


async def test_client_in_a_process_of_its_own_tells_the_same() -> None:
    import asyncio

    async with slow_server(0.05) as url:
        run = await asyncio.to_thread(
            run_client, url, [(0.0, {"a": 1}), (0.1, {"b": 2})], timeout_s=9
        )
    assert [json.loads(answer.body) for answer in run.answers] == [{"a": 1}, {"b": 2}]
    assert 0 < run.usage.cpu_s < 10
    assert run.usage.wall_s >= 0.15


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        (Answer(0.0, 0.9, 200, image_reply()), "in time"),
        (Answer(0.0, 1.1, 200, image_reply()), "late"),
        (Answer(0.0, 0.9, 200, image_reply(num_steps=9)), "degraded"),
        (Answer(0.0, 0.1, 429, b"{}"), "refused"),
        (Answer(0.0, 0.5, 503, b'{"error": {"code": "deadline_missed"}}'), "dropped"),
        (Answer(0.0, 0.5, 503, b'{"error": {"code": "unavailable"}}'), "failed"),
        (Answer(0.0, 0.5, 500, b"oh"), "failed"),
        (Answer(0.0, 0.5, 200, b"no json"), "failed"),
        (Answer(0.0, 0.5, 200, b'{"data": []}'), "failed"),
        (Answer(0.0, 0.5, 200, image_reply(width=128)), "failed"),
        (Answer(0.0), "lost"),
    ],
)
def test_only_a_whole_image_by_the_deadline_is_no_miss(answer: Answer, fate: str) -> None:
    outcome = outcome_of(ASKED, answer)
    assert outcome.fate == fate
    figures = figures_of([ASKED], [outcome])
    assert figures["attainment"] == (1.0 if fate == "in time" else 0.0)
    assert sum(figures["fates"].values()) == 1


def test_latencies_are_those_of_images_only() -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("late", 3.0), CallOutcome("refused", 0.01)]
    figures = figures_of([ASKED] * 3, outcomes)
    assert figures["latency_s"]["p50"] == pytest.approx(2.0)
    assert figures["attainment_by_size"] == {"64x64": pytest.approx(1 / 3)}


def test_books_that_agree_lose_nothing() -> None:
    outcomes = [
        CallOutcome(fate, 1.0) for fate in ("in time", "late", "refused", "dropped", "failed")
    ]
    books = account(outcomes, Counts(accepted=4, completed=2, dropped=1, failed=1))
    assert books["nothing_lost"]
    assert books["client_and_service"]["accepted"] == [4, 4]


@pytest.mark.parametrize(
    "counts",
    [
        Counts(accepted=3, completed=2, dropped=0, failed=0),  # one has not ended
        Counts(accepted=3, completed=3, dropped=0, failed=0),  # one more than came
        Counts(accepted=2, completed=2, dropped=0, failed=0),  # fewer than were let in
    ],
)
def test_books_that_differ_are_found_out(counts: Counts) -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("late", 2.0), CallOutcome("failed", 1.0)]
    assert not account(outcomes, counts)["nothing_lost"]


def test_answer_that_never_came_is_found_out_even_if_the_service_made_it() -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("lost", None)]
    assert not account(outcomes, Counts(2, 2, 0, 0))["nothing_lost"]


def test_own_work_is_not_taken_for_that_of_others() -> None:
    meter, started_s = CpuMeter(), time.process_time()
    while time.process_time() - started_s < 0.5:
        pass
    usage = meter.read(client_cpu_s=0.0)
    [own] = [share for role, share in usage["cores_by_role"].items() if "benchmark" in role]
    assert own > 0.2
    cores = len(os.sched_getaffinity(0))
    # the kernel counts in hundredths of a second
    assert usage["cores_of_others"] <= cores - own + 0.1
    # what is said to be a client's is not others'
    assert meter.read(client_cpu_s=1e6)["cores_of_others"] == 0.0


def test_only_the_cores_that_it_may_run_on_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", "user system idle iowait")
    readings = iter(
        [
            [times(10.0, 1.0, 50.0, 2.0), times(70.0, 3.0, 5.0, 0.0)],
            [times(10.0, 1.0, 51.0, 3.0), times(900.0, 3.0, 5.0, 0.0)],
        ]
    )
    monkeypatch.setattr(processes.psutil, "cpu_times", lambda **_: next(readings))
    monkeypatch.setattr(processes, "cpu_s_by_role", dict)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    # whatever the other core does
    assert CpuMeter().read(client_cpu_s=0.0)["cores_of_others"] == 0.0
