"""The service beside the common practice: the same requests for all, counted right."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness import Study
from benchmarks.serving import compare
from benchmarks.serving.attainment import Attainments, crossing
from benchmarks.serving.client import Answer, call_all, run_client
from benchmarks.serving.compare import CONTENDERS, Calibration, Cell, tabulate
from benchmarks.serving.services import Baseline, Counts, running
from benchmarks.serving.traces import (
    FATES,
    SHAPES,
    CallOutcome,
    Planned,
    Shape,
    Trace,
    draw_trace,
    loses_nothing,
    outcome_of,
)
from ray_cluster.config.loading import load_config
from ray_cluster.models.latency_profiles import save_profile
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey
from tests.benchmarks.test_services import Stub

PLANNED = Planned(0.0, Shape(64, 64, 10), "a circle", seed=1, slo_s=1.0)
ALONE_S = {shape.name: 0.01 * shape.num_steps * shape.width_px / 64 for shape in SHAPES}


def trace(process: str = "poisson", count: int = 40, number: int = 0) -> Trace:
    words = ["a circle", "a square"]
    return draw_trace(process, number, count, words, rate_per_s=2.0, alone_s=ALONE_S)


def image_reply(width: int = 64, height: int = 64, num_steps: int = 10) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    coded = base64.b64encode(buffer.getvalue()).decode()
    return json.dumps({"data": [{"b64_json": coded, "num_inference_steps": num_steps}]}).encode()


@asynccontextmanager
async def gated_server(num_calls: int = 1, *, cuts_off: bool = False) -> AsyncIterator[str]:
    """An HTTP server that answers once so many calls have come, or ends without; yields its URL."""
    gate, num_seen = asyncio.Event(), 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_seen
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                num_seen += 1
                if num_seen >= num_calls:
                    gate.set()
                await gate.wait()
                if cuts_off:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        gate.set()


async def test_arrivals_do_not_wait_for_answers_and_latency_is_from_the_plan() -> None:
    calls = [(0.01 * index, {"number": index}) for index in range(20)]
    # no answer comes before the last call has
    async with gated_server(len(calls)) as url:
        run = await call_all(url, calls, timeout_s=100)
    assert [json.loads(answer.body)["number"] for answer in run.answers] == list(range(20))
    assert (run.answers[0].latency_s or 0) >= 0.19
    # due a second before the client begins
    async with gated_server() as url:
        [answer] = (await call_all(url, [(-1.3, {})], timeout_s=100)).answers
    assert 0.9 <= answer.late_send_s <= (answer.latency_s or 0)


async def test_a_call_without_an_answer_is_lost_and_says_why() -> None:
    async with gated_server(cuts_off=True) as url:
        [cut_off] = (await call_all(url, [(0.0, {})], timeout_s=100)).answers
    outcome = outcome_of(PLANNED, cut_off)
    assert (outcome.fate, outcome.latency_s) == ("lost", None)
    assert "RemoteProtocolError" in outcome.problem or "ReadError" in outcome.problem
    async with gated_server(2) as url:
        [late] = (await call_all(url, [(0.0, {})], timeout_s=0.2)).answers
    assert outcome_of(PLANNED, late).fate == "lost"


async def test_a_client_in_a_process_of_its_own_returns_the_same() -> None:
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
        (Answer(0.0, 0.5, 200, b"no json"), "failed"),
        (Answer(0.0, 0.5, 200, b'{"data": []}'), "failed"),
        (Answer(0.0, 0.5, 200, image_reply(width=128)), "failed"),
        (Answer(0.0), "lost"),
    ],
)
def test_only_a_whole_image_by_the_deadline_is_no_miss(answer: Answer, fate: str) -> None:
    assert outcome_of(PLANNED, answer).fate == fate


@pytest.mark.parametrize(
    ("counts", "is_right"),
    [
        (Counts(4, 2, 1, 1), True),
        (Counts(4, 2, 1, 0), False),  # one has not ended
        (Counts(4, 3, 1, 0), False),  # one more than came
        (Counts(3, 2, 1, 0), False),  # fewer than were accepted
    ],
)
def test_counts_that_differ_are_found_out(counts: Counts, is_right: bool) -> None:
    fates = ("in time", "late", "refused", "dropped", "failed")
    assert loses_nothing([CallOutcome(one, 1.0) for one in fates], counts) == is_right
    # an answer that never came, even if the service made it
    assert not loses_nothing([CallOutcome("lost", None)], Counts(1, 1, 0, 0))


def test_traces_are_the_same_every_time_with_the_spread_of_their_process() -> None:
    assert trace() == trace() != trace(number=1)
    for process, cv in (("poisson", 1.0), ("bursty", 2.0)):
        requests = trace(process, 2000).requests
        gaps = np.diff([one.arrival_s for one in requests])
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)
        assert requests[-1].arrival_s == pytest.approx(1000, rel=0.3)
        assert {one.shape for one in requests} == set(SHAPES)
        assert all(one.slo_s == pytest.approx(5 * ALONE_S[one.shape.name]) for one in requests)
        assert len({one.seed for one in requests}) == len(requests)
    for slow, fast in zip(trace().requests, trace().at(2.0), strict=True):
        assert fast == slow._replace(arrival_s=fast.arrival_s)
        assert fast.arrival_s == pytest.approx(slow.arrival_s / 2)


def test_a_prediction_replays_the_very_trace_on_a_profile(tmp_path: Path) -> None:
    rows = [
        LatencyRow(
            OperationKey("step", *shape[:2], batch=batch, uses_guidance=True),
            0.004 * batch * shape.width_px / 64,
            "measured",
            "a test of the benchmarks",
        )
        for shape in SHAPES
        if shape.num_steps == 10
        for batch in (1, 8)
    ]
    profile = LatencyProfile("p", "shapes-sd", "cpu", tuple(rows))
    save_profile(tmp_path / "profile.yaml", profile)
    compare.write_trace(tmp_path / "trace.csv", trace().arrivals())
    content = compare.replay_of(tmp_path, "a trace", 8, "deadline/one-size", (0.1, 20.0))
    slow, fast = compare.simulated(tmp_path, content)
    assert (slow["speed"], fast["speed"]) == (0.1, 20.0)
    # no queue at a tenth of the pace; at twenty times of it hardly a request can be in time
    assert slow["attainment"]["value"] == 1.0
    assert fast["attainment"]["value"] < 0.6


def test_a_run_counts_what_became_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = trace(count=20)
    refused = sum(one.seed % 7 == 6 for one in planned.requests)
    monkeypatch.setattr(compare, "_SETTLE_S", 0.3)
    with running(Stub()) as service:
        outcomes, row = compare._run(Stub(), service, planned, 20.0)
        assert row["fates"]["refused"] == refused > 0
        assert row["fates"]["in time"] == sum(bool(one.png) for one in outcomes) == 20 - refused
        assert row["loses_nothing"]
        _, row = compare._run(Stub(forgets=1000), service, planned, 20.0)
        assert not row["loses_nothing"]


def test_a_call_leaves_out_what_the_contender_omits() -> None:
    body = PLANNED.body(CONTENDERS["ours/no-deadlines"])
    assert (body["when_late"], body["size"]) == ("accept", "64x64")
    assert "slo_s" not in body
    assert PLANNED.body(CONTENDERS["static"])["slo_s"] == 1.0


@pytest.mark.parametrize("name", [n for n, c in CONTENDERS.items() if not isinstance(c, Baseline)])
def test_the_configuration_of_the_service_is_one_that_it_takes(tmp_path: Path, name: str) -> None:
    config = load_config(compare._known(CONTENDERS[name]).config(tmp_path, 18999))
    [pool] = config.pools
    assert (pool.replicas, pool.num_threads, pool.dtype) == (1, 1, "bfloat16")
    assert config.ray.auth == "disabled"
    assert str(tmp_path) in config.storage.jobs


LOADS = (0.5, 1.0, 1.5)
# in time at the three loads
SHARES = {"one-by-one": (0.7, 0.5, 0.2), "static": (1.0, 0.8, 0.4), "ours": (1.0, 1.0, 0.8)}


def summed_up(shares: Mapping[str, tuple[float, ...]] | None = None, **more: Any) -> dict[str, Any]:
    traces = ["poisson-0", "poisson-1", "bursty-0"]
    rows = {
        Cell(name, load, one): {
            "attainment": share,
            "fates": {**dict.fromkeys(FATES, 0), "in time": round(40 * share)},
            "seconds": [0.5],
            "loses_nothing": True,
            "client_late_s": 0.004,
            "cores_of_others": 0.25,
            **more,
        }
        for name, found in {**SHARES, **(shares or {})}.items()
        for load, share in zip(LOADS, found, strict=True)
        for one in traces
    }
    study, known = Study(quick=True), Calibration(ALONE_S, {"static": 4.0})
    predicted = {Cell("ours", load, one): 0.97 for one in traces for load in LOADS}
    tabulate(study, list(SHARES), LOADS, traces, rows, predicted, known=known)
    return study.found


def test_the_headline_is_over_the_baseline_that_does_best_at_it() -> None:
    found = summed_up()
    rows = found["tables"]["in time"]
    assert {row["traces"] for row in rows} == {"all", "poisson", "bursty"}
    [row] = [r for r in rows if (r["traces"], r["load"], r["contender"]) == ("all", 1.5, "ours")]
    assert row["best_baseline"] == "static"
    assert row["points_over_best"]["value"] == pytest.approx(40)
    assert row["simulated_percent"] == pytest.approx(97)
    aims = {aim["name"].removeprefix("all traces: "): aim for aim in found["aims"]}
    # 1.25 over 0.75; ours has 0.9 where static has 0.6, at 1.25
    goodput = aims["goodput at 90 % in time, over static"]
    assert (goodput["measured"], goodput["verdict"]) == (pytest.approx(5 / 3), "no")
    there = aims["ours in time where static has 60 %"]
    assert (there["measured"], there["verdict"]) == (pytest.approx(90), "yes")
    # 0.97 beside 1.0, and beside 0.8
    verdicts = [aims[f"simulated beside live, ours, load {load:g}"]["verdict"] for load in LOADS]
    assert verdicts == ["yes", "yes", "no"]
    assert "problems" not in found
    lost = summed_up(loses_nothing=False)["problems"]
    assert "static lost requests at load 1" in lost


@pytest.mark.parametrize(
    ("shares", "note"),
    [
        ({"ours": (0.8, 0.7, 0.6)}, "ours has less than 90 % in time at every load"),
        ({"static": (1.0, 1.0, 1.0)}, "static has 90 % in time at every load"),
        ({"static": (1.0, 1.0, 0.7)}, "static has more than 60 % in time at every load"),
    ],
)
def test_what_was_not_reached_is_said_and_never_judged(
    shares: dict[str, tuple[float, ...]], note: str
) -> None:
    found = summed_up(shares)
    assert any(note in one for one in found["notes"])
    judged = [aim["name"] for aim in found["aims"]]
    assert not any(("60 %" if "60 %" in note else "goodput") in name for name in judged)


@pytest.mark.parametrize("shares", [{"static": (0.8, 0.5, 0.4)}, {"ours": (1.0, 1.0, 1.0)}])
def test_what_may_be_more_is_not_too_little(shares: dict[str, tuple[float, ...]]) -> None:
    verdicts = {aim["name"]: aim["verdict"] for aim in summed_up(shares)["aims"]}
    goodput = [one for name, one in verdicts.items() if "goodput" in name]
    assert goodput
    assert set(goodput) <= {"yes", "unsure"}


def test_a_crossing_is_on_the_line_between_two_loads() -> None:
    assert crossing((0.5, 1.0), (1.0, 0.8), 0.9) == (pytest.approx(0.75), "")
    assert crossing((0.5, 1.0), (0.8, 0.7), 0.9) == (0.5, "below")
    assert str(crossing((0.5, 1.0), (1.0, 0.95), 0.9)) == "above 1.00"


def test_a_difference_is_of_the_same_traces() -> None:
    spread = np.array([[0.9, 0.5, 0.7, 0.3]])
    found = Attainments((1.0,), {"mine": spread + 0.1, "theirs": spread})
    gain = found.gain("mine", "theirs", 0)
    assert (gain["low"], gain["high"]) == pytest.approx((10, 10))
    alone = found.at("mine", 0)
    assert alone["low"] < alone["value"] - 5 < alone["value"] + 5 < alone["high"]


def saved(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(("change", "is_equal"), [(2, True), (100, False)])
def test_images_may_differ_by_rounding(change: int, is_equal: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 100, (16, 16, 3))
    study = Study(quick=True)
    images = {
        ("one-by-one", "t"): [b"", saved(pixels)],
        ("ours", "t"): [saved(pixels), saved(pixels + change * (pixels % 2))],
    }
    compare._compare_images(study, images)
    [row] = study.found["tables"]["images"]
    assert (row["reference"], row["num_images"]) == ("one-by-one", 1)
    assert ("problems" not in study.found) == is_equal
