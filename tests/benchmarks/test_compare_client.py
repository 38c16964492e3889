import asyncio
import json
import os
from collections import namedtuple

import pytest

from benchmarks.serving import processes
from benchmarks.serving.compare.client import Answer, call_all, run_client
from benchmarks.serving.compare.outcomes import (
    CallOutcome,
    account,
    figures_of,
    latencies_s,
    outcome_of,
)
from benchmarks.serving.compare.settings import Shape
from benchmarks.serving.compare.traces import Planned
from benchmarks.serving.contenders import Counts
from benchmarks.serving.processes import CpuMeter
from tests.benchmarks.comparing import gated_server, image_reply

PLANNED = Planned(0.0, Shape(64, 64, 10), "a circle", seed=1, slo_s=1.0)


async def test_arrivals_do_not_wait_for_answers() -> None:
    calls = [(0.01 * index, {"number": index}) for index in range(20)]
    # no answer comes before the last call has
    async with gated_server(len(calls)) as url:
        run = await call_all(url, calls, timeout_s=100)
    assert [json.loads(answer.body)["number"] for answer in run.answers] == list(range(20))
    assert (run.answers[0].latency_s or 0) >= 0.19


async def test_latency_counts_from_the_planned_instant_and_not_from_sending() -> None:
    # due a second before the client begins
    async with gated_server() as url:
        run = await call_all(url, [(-1.3, {})], timeout_s=100)
    [answer] = run.answers
    assert answer.late_send_s >= 0.9
    assert answer.latency_s is not None
    assert answer.latency_s >= answer.late_send_s


async def test_call_without_an_answer_is_lost_and_says_why() -> None:
    async with gated_server(cuts_off=True) as url:
        run = await call_all(url, [(0.0, {})], timeout_s=100)
    outcome = outcome_of(PLANNED, run.answers[0])
    assert (outcome.fate, outcome.latency_s) == ("lost", None)
    assert "RemoteProtocolError" in outcome.problem or "ReadError" in outcome.problem


async def test_answer_that_does_not_come_in_time_is_lost() -> None:
    async with gated_server(2) as url:
        run = await call_all(url, [(0.0, {})], timeout_s=0.2)
    assert outcome_of(PLANNED, run.answers[0]).fate == "lost"


async def test_client_in_a_process_of_its_own_returns_the_same() -> None:
    async with gated_server(2) as url:
        calls = [(0.0, {"a": 1}), (0.1, {"b": 2})]
        run = await asyncio.to_thread(run_client, url, calls, timeout_s=100)
    assert [json.loads(answer.body) for answer in run.answers] == [{"a": 1}, {"b": 2}]
    assert run.cpu_s > 0
    assert run.wall_s >= 0.1


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
    outcome = outcome_of(PLANNED, answer)
    assert outcome.fate == fate
    figures = figures_of([outcome])
    assert figures["attainment"] == (1.0 if fate == "in time" else 0.0)
    assert sum(figures["fates"].values()) == 1


def test_latencies_are_those_of_images_only() -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("late", 3.0), CallOutcome("refused", 0.01)]
    assert latencies_s(figures_of(outcomes)) == [1.0, 3.0]


def test_counts_that_agree_lose_nothing() -> None:
    outcomes = [
        CallOutcome(fate, 1.0) for fate in ("in time", "late", "refused", "dropped", "failed")
    ]
    accounts = account(outcomes, Counts(accepted=4, completed=2, dropped=1, failed=1))
    assert accounts["nothing_lost"]
    assert accounts["client_and_service"]["accepted"] == [4, 4]


@pytest.mark.parametrize(
    "counts",
    [
        Counts(accepted=3, completed=2, dropped=0, failed=0),  # one has not ended
        Counts(accepted=3, completed=3, dropped=0, failed=0),  # one more than came
        Counts(accepted=2, completed=2, dropped=0, failed=0),  # fewer than were accepted
    ],
)
def test_counts_that_differ_are_found_out(counts: Counts) -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("late", 2.0), CallOutcome("failed", 1.0)]
    assert not account(outcomes, counts)["nothing_lost"]


def test_answer_that_never_came_is_found_out_even_if_the_service_made_it() -> None:
    outcomes = [CallOutcome("in time", 1.0), CallOutcome("lost", None)]
    assert not account(outcomes, Counts(2, 2, 0, 0))["nothing_lost"]


Times = namedtuple("Times", "user system idle iowait")


def meter_over(
    monkeypatch: pytest.MonkeyPatch, cores: list[tuple[Times, Times]], own_s: float
) -> CpuMeter:
    """A meter that is read once, a second later, when the cores' and the service's times are so."""
    readings = iter(zip(*cores, strict=True))
    monkeypatch.setattr(processes.psutil, "cpu_times", lambda **_: next(readings))
    used = iter([{"gateway": 5.0}, {"gateway": 5.0 + own_s}])
    monkeypatch.setattr(processes, "cpu_s_by_role", lambda: next(used))
    monkeypatch.setattr(processes.time, "perf_counter", iter([100.0, 101.0]).__next__)
    return CpuMeter()


def test_only_work_of_others_is_taken_for_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # a core is busy for 0.9 s of the second: 0.5 of the service, 0.1 of the client
    core = (Times(10.0, 1.0, 50.0, 2.0), Times(10.7, 1.2, 50.1, 2.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    usage = meter_over(monkeypatch, [core], own_s=0.5).read(client_cpu_s=0.1)
    assert usage["cores_by_role"] == {"gateway": pytest.approx(0.5)}
    assert usage["cores_of_others"] == pytest.approx(0.3)


def test_only_the_cores_that_it_may_run_on_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = (Times(10.0, 1.0, 50.0, 2.0), Times(10.0, 1.0, 51.0, 3.0))
    busy = (Times(70.0, 3.0, 5.0, 0.0), Times(900.0, 3.0, 5.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    usage = meter_over(monkeypatch, [idle, busy], own_s=0.0).read(client_cpu_s=0.0)
    assert usage["cores_of_others"] == 0.0
