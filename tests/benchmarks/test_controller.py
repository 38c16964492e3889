"""The controller's benchmark: the same day for all, and an audit that finds what goes wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.serving.contenders import Counts, Site
from benchmarks.serving.controller import section
from benchmarks.serving.controller_audit import Ended, audit
from benchmarks.serving.controller_calls import mixed_prompts, post
from benchmarks.serving.controller_comparison import (
    OURS,
    RIVALS,
    STATIC,
    core_seconds,
    row_of,
)
from benchmarks.serving.controller_plot import main as draw
from benchmarks.serving.controller_policies import SERVE
from benchmarks.serving.controller_reshapes import (
    Reshape,
    Reshaped,
    changes_by_dwell,
    planned_at,
)
from benchmarks.serving.controller_service import (
    HEAVY,
    LIGHT,
    ControlledContender,
    Service,
)
from benchmarks.serving.controller_simulated import simulate_all
from benchmarks.serving.controller_trace import (
    Answer,
    by_bin,
    gap,
    over_time,
    rights,
    squeezed_day,
    violations,
)
from benchmarks.serving.controller_watch import DIFFSERVE, Round
from ray_cluster.config.loading import load_config
from tests.benchmarks.controlled_cell import JUDGE, day, live_day, observation

ROOT = Path(__file__).resolve().parents[2]


def answer(at_s: float, *, is_right: bool | None = True, is_late: bool = False) -> Answer:
    stage = None if is_right is None else "light"
    return Answer(at_s, "late" if is_late else "in time", stage, is_right)


def test_a_day_has_bursts_and_is_always_the_same() -> None:
    steady = squeezed_day(20.0, 20.0, 400.0, slo_s=2.0, num_prompts=30)
    gaps = np.diff(steady.instants_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.2, abs=0.05)
    assert steady == squeezed_day(20.0, 20.0, 400.0, slo_s=2.0, num_prompts=30)
    assert set(steady.prompts) == set(range(30))
    squeezed = squeezed_day(2.0, 20.0, 240.0, slo_s=2.0, num_prompts=30)
    per_hour = np.histogram(squeezed.instants_s, bins=24, range=(0, 240))[0]
    assert per_hour[10:20].mean() > 4 * per_hour[1:6].mean()
    assert len(squeezed.prompts) == len(squeezed.instants_s)


def test_figures_are_those_of_the_calls_that_arrived_in_a_bin() -> None:
    answers = [answer(1.0), answer(9.9, is_late=True), answer(10.0, is_right=False)]
    answers += [answer(35.0, is_right=None, is_late=True)]
    assert by_bin(answers, violations(answers), 40.0) == pytest.approx(
        [50.0, 0.0, math.nan, 100.0], nan_ok=True
    )
    rows = over_time({"a": answers, "b": [answer(1.0)]}, 40.0)
    assert [row["calls"] for row in rows] == [2, 1, 0, 1]
    assert rows[1]["a: all right, %"] == 0.0
    assert rows[3]["a: all right, %"] is None
    assert rows[3]["a: violations, %"] == 100.0
    assert rows[0]["b: violations, %"] == 0.0


def test_a_gap_is_of_the_same_calls_and_leaves_out_what_is_unknown() -> None:
    ours_, others = [1.0, 1.0, math.nan, 0.0] * 50, [1.0, 0.0, 0.0, 0.0] * 50
    found = gap(ours_, others)
    assert found.value == pytest.approx(100 * (2 / 3 - 1 / 4))
    assert found.low < found.value < found.high
    equal = gap(others, others)
    assert (equal.size, equal.size_interval) == (0.0, (0.0, 0.0))
    with pytest.raises(ValueError, match="same calls"):
        gap([1.0], [1.0, 0.0])


def pictures(*shades: int) -> list[Ended]:
    return [
        Ended(number, ("m", number % 2), np.full((4, 4, 3), shade, np.uint8))
        for number, shade in enumerate(shades)
    ]


def test_an_audit_accepts_calls_that_all_ended_once() -> None:
    # one unit of 255 is rounding
    assert audit(4, pictures(10, 99, 11, 99), Counts(4, 4, 0, 0)) == []


@pytest.mark.parametrize(
    ("num_sent", "ended", "counts", "said"),
    [
        (5, pictures(10, 99, 10, 99), Counts(4, 4, 0, 0), "1 of 5 calls never ended"),
        (4, pictures(10, 99, 10, 99), Counts(5, 4, 0, 0), "1 images were accepted and never"),
        (4, pictures(10, 99, 10, 99), Counts(5, 5, 0, 0), "completed 5 images, and clients got 4"),
        (2, pictures(10, 99) + pictures(10), Counts(3, 3, 0, 0), "the call 0 ended 2 times"),
        (4, pictures(10, 99, 12, 99), Counts(4, 4, 0, 0), "the image of call 2 is not the first"),
        (
            3,
            [*pictures(10, 99), Ended(2, ("m", 0), None, "503")],
            Counts(2, 2, 0, 0),
            "1 calls failed: 503",
        ),
    ],
)
def test_an_audit_finds_what_is_lost_failed_made_twice_or_another(
    num_sent: int, ended: Sequence[Ended], counts: Counts, said: str
) -> None:
    [problem] = audit(num_sent, ended, counts)
    assert said in problem


HISTORY: list[dict[str, Any]] = [
    {"at": 130.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
    {"at": 112.0, "took_s": 0.5, "actions": ["batch caps and thresholds"]},
    {"at": 111.0, "took_s": 0.5, "actions": [f"{HEAVY}: 2 to 1 replicas", f"{LIGHT}: 0 to 1"]},
    {"at": 90.0, "took_s": 0.5, "actions": [f"{HEAVY}: 1 to 2 replicas"]},
]


def test_a_reshape_begins_with_the_first_round_that_plans_it() -> None:
    assert planned_at(HISTORY, HEAVY, 2, 100.0) == 129.5
    assert planned_at(HISTORY, HEAVY, 2, 80.0) == 89.5
    assert planned_at(HISTORY, HEAVY, 0, 80.0) is None
    # the light model's name begins with the heavy one's
    assert planned_at(HISTORY, LIGHT, 2, 80.0) is None
    assert Reshape("up", 100.0, 129.5, 140.0).took_s == 10.5
    assert Reshape("up", 100.0, None, 140.0).took_s is None


def test_changes_are_counted_by_dwell_time() -> None:
    assert changes_by_dwell(HISTORY, HEAVY, 100.0, 15.0, 3) == [1, 0, 1]
    assert changes_by_dwell(HISTORY, HEAVY, 85.0, 15.0, 1) == [1]


def test_core_seconds_are_those_reserved_during_the_trace() -> None:
    seen = observation()
    found = [
        Round(99.0, {HEAVY: 1, LIGHT: 1, JUDGE: 1}, 200, seen),
        Round(104.0, {HEAVY: 2, LIGHT: 1, JUDGE: 1}, 200, seen),
    ]
    assert core_seconds(found, 100.0, 110.0) == pytest.approx(1.0 * 4 + 1.5 * 6)
    assert core_seconds([], 100.0, 110.0) == 0.0


@pytest.fixture(scope="module")
def days() -> tuple[Any, Any, Any]:
    """A day, as it ran, and as it is simulated."""
    one = day(20.0)
    live = live_day(one)
    return one, live, simulate_all(one, live, lambda _done, _what: None)


def test_the_tables_have_every_policy_and_the_plot_is_drawn(
    days: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    one, live, simulated = days
    assert {OURS, STATIC, DIFFSERVE, SERVE, "proteus", "all-heavy"} <= simulated.keys()
    reshapes = [Reshape("up", 0.0, 1.0, 9.0), Reshape("silent", 0.0, 2.0, 3.0)]
    found = section(Reshaped(reshapes, [1, 0], 30, []), one, live, simulated, 1.9)
    assert found["problems"] == []
    tables = found["tables"]
    assert [row["policy"] for row in tables["a day, live"]] == list(RIVALS)
    assert {row["policy"] for row in tables["the same day, simulated"]} == simulated.keys()
    [_, changes] = [aim for aim in found["aims"] if "dwell" in aim["name"] or "p50" in aim["name"]]
    assert changes["measured"] == 0.5
    # the live run of ours was made by the same simulation
    [same] = [aim for aim in found["aims"] if aim["name"].endswith("violations: ours")]
    assert (same["measured"], same["verdict"]) == (0.0, "yes")
    result = {
        "machine": {"cpu": "x"},
        "started": "2026-11-26T00:00:00",
        "commit": "none",
        "sections": {"controller": found},
    }
    path = tmp_path / "found.json"
    path.write_text(json.dumps(result))
    draw([str(path)])
    assert path.with_suffix(".png").is_file()


def test_a_run_whose_images_are_others_is_a_problem(days: tuple[Any, Any, Any]) -> None:
    one, live, simulated = days
    wrong = [
        replace(made, is_right=not made.is_right) if made.is_right is not None else made
        for made in live[OURS].answers
    ]
    live = {**live, OURS: replace(live[OURS], answers=wrong)}
    reshaped = Reshaped([Reshape("up", 0.0, None, None)], [0], 1, ["never done"])
    problems = section(reshaped, one, live, simulated, 2.0)["problems"]
    assert problems[0] == "never done"
    assert "are not those made beforehand" in problems[1]


def test_a_caller_that_hung_up_was_answered_late_and_any_other_failure_is_one() -> None:
    fates = []
    for error in (httpx.ReadTimeout, httpx.ConnectTimeout, httpx.ReadError):

        def fail(_: httpx.Request, error: type[httpx.TransportError] = error) -> httpx.Response:
            raise error("")

        with httpx.Client(transport=httpx.MockTransport(fail), base_url="http://x") as client:
            fates.append(post(client, mixed_prompts(1)[0], 1.0).fate)
    assert fates == ["late", "failed", "failed"]


def test_a_row_tells_late_from_refused() -> None:
    answers = [answer(0.0), answer(1.0, is_late=True), Answer(2.0, "refused")]
    row = row_of("x", answers)
    assert (row["calls"], row["late"], row["refused"], row["failed"]) == (3, 1, 1, 0)
    assert row["violations, %"].startswith("66.7")
    assert row["all right, %"].startswith("100.0")
    assert row["of calls right in time, %"].startswith("33.3")
    assert rights(answers)[:2] == [1.0, 1.0]


def test_services_differ_in_their_cascades_and_controllers_alone(tmp_path: Path) -> None:
    for name, rival in RIVALS.items():
        contender = ControlledContender(
            what=name, cascade=rival.cascade, control=rival.control, default_slo_s=2.5
        )
        config = load_config(contender.config(Site(tmp_path, tmp_path, "float32", {}), 18999))
        [cascade] = config.cascades
        assert config.control.enabled == (name != STATIC)
        assert cascade.threshold == (0.5 if name == STATIC else 1.0)
        assert cascade.reserve_s == (None if name == DIFFSERVE else 0.5)
        assert config.dispatch.default_slo_s == 2.5
        assert [one.replicas for one in config.pools] == [1, 1]


def test_live_settings_change_one_pool_and_the_controller(tmp_path: Path) -> None:
    contender = ControlledContender(what="", cascade=None, control={"dwell_s": 1.0})
    launch = contender.launch(Site(tmp_path, tmp_path, "float32", {}))
    service = Service(launch.url, contender.files[-1], "")
    service.tune({HEAVY: {"min_replicas": 2, "max_replicas": 2}}, dwell_s=15.0)
    config = load_config(service.file)
    heavy, light = config.pools
    assert (heavy.name, heavy.min_replicas, heavy.max_replicas) == (HEAVY, 2, 2)
    assert (light.min_replicas, light.max_replicas) == (1, None)
    assert config.control.dwell_s == 15.0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_run_reshapes_and_compares(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", "controller"]
    done = subprocess.run(
        [*command, "--out", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["sections"]["controller"]
    assert found["problems"] == []
    tables = found["tables"]
    assert [row["policy"] for row in tables["a day, live"]] == list(RIVALS)
    assert all(row["done"] == row["count"] for row in tables["reshapes"] if "done" in row)
    assert all(row["failed"] == 0 for row in tables["a day, live"])
