"""Contenders in turns, figures with their intervals, and how they are shown."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.figures import (
    absolute,
    at_most,
    mean_figure,
    paired_ratio,
    percentile,
    scaled,
    summarise,
)
from benchmarks.harness import (
    Case,
    Cost,
    Plot,
    Sampling,
    Study,
    in_turns,
    largest_difference,
    ratio,
    sample_in_turns,
)
from benchmarks.tables import as_json, draw, figure_text, has_problems, print_sections


def test_a_summary_is_the_median_and_the_range_with_an_interval_between() -> None:
    found = summarise([3.0, 1.0, 2.0, 10.0])
    assert (found["median"], found["min"], found["max"], found["n"]) == (2.5, 1.0, 10.0, 4)
    low, high = summarise([float(value) for value in range(30)])["ci95"]
    # the 95 % interval of the median of 30 ordered samples is about ranks 10 to 21
    assert 7 <= low <= 12
    assert 17 <= high <= 22
    steady, noisy = summarise([1.0, 1.01, 0.99, 1.02]), summarise([1.0, 1.5, 0.5, 1.9])
    assert np.ptp(steady["ci95"]) < np.ptp(noisy["ci95"])
    assert summarise([1 / 3, 2.0])["samples"] == [0.3333, 2.0]
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 95) == pytest.approx(3.8)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_a_summary_refuses_what_is_no_measurement(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        summarise(samples)


def test_a_paired_ratio_is_immune_to_what_slows_both_sides() -> None:
    slowdown = [1.0, 5.0, 2.0, 9.0]
    found = paired_ratio([3.0 * s for s in slowdown], [1.5 * s for s in slowdown])
    assert found["min"] == found["max"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="denominator"):
        paired_ratio([1.0], [0.0])
    with pytest.raises(ValueError, match="argument"):
        paired_ratio([1.0], [1.0, 2.0])


def test_figures_are_scaled_and_lose_their_sign_with_their_intervals() -> None:
    figure = {"value": -2.0, "low": -3.0, "high": 1.0}
    assert scaled(figure, -100, less=1) == {"value": 300.0, "low": 0.0, "high": 400.0}
    assert absolute(figure) == {"value": 2.0, "low": 0.0, "high": 3.0}
    assert absolute({"value": -2.0, "low": -3.0, "high": -1.0})["low"] == 1.0
    mean = mean_figure([1.0, 2.0, 3.0])
    assert (mean["value"], mean["high"]) == (2.0, pytest.approx(2 + 1.96 / 3**0.5))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.02] * 5, "yes"), ([1.09] * 5, "no"), ([1.01, 1.02, 1.04, 1.08, 1.09], "unsure")],
)
def test_an_aim_is_judged_by_the_whole_interval(ratios: list[float], verdict: str) -> None:
    assert at_most("overhead", 1.05, summarise(ratios), "x")["verdict"] == verdict


def images(value: int) -> Callable[[], dict[str, object]]:
    return lambda: {"a": np.full((2, 2, 3), value, np.uint8)}


def test_only_images_of_the_baseline_get_a_speed_up() -> None:
    ways = {"base": images(0), "right": images(1), "wrong": images(9), "rounded": images(9)}
    study = Study(quick=True)
    case = Case({"px": 64}, ways | {"bare": lambda: None}, 2, inexact=("rounded",))
    rows = study.compare("ways", case)
    assert {name for name, row in rows.items() if "speed_up" in row} == {
        *("base", "right", "rounded", "bare")
    }
    assert rows["base"]["speed_up"]["median"] == 1
    assert rows["wrong"]["largest_difference_255"] == 9
    assert study.found["problems"] == ["px 64, wrong: images differ by 9/255, allowed 1"]
    assert study.found["tables"]["ways"] == list(rows.values())


def test_a_share_of_the_work_counts_as_much_by_the_clock_that_is_asked_for() -> None:
    spent_s = iter(range(1000))

    def now() -> Cost:
        return Cost(0.0, 1.0, 10.0 * next(spent_s))

    ways = {"one": lambda: None, "five": lambda: None}
    case = Case({}, ways, 3, {"five": 5}, "process", now=now)
    # the wall clock stands still
    with pytest.raises(ValueError, match="positive"):
        Study(quick=True).compare("t", case)
    costs = in_turns(ways, 3, shares={"five": 5}, now=now)
    assert [one.process_s for one in costs["five"]] == [2.0] * 3
    rows = {name: {"cpu_ms": {"samples": [one.process_s for one in costs[name]]}} for name in ways}
    assert ratio(rows, "one", "five")["median"] == 5


def test_a_difference_is_the_largest_over_common_images_and_has_no_overflow() -> None:
    dark, light = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    almost = dark.copy()
    almost[1, 1, 2] = 1
    assert largest_difference({"a": dark, "b": dark}, {"a": almost, "c": light}) == 1
    assert largest_difference({"a": dark, "b": dark}, {"a": dark, "b": light}) == 255
    with pytest.raises(ValueError, match="nothing to compare"):
        largest_difference({"a": dark}, {"b": dark})


def test_the_order_of_contenders_alternates() -> None:
    seen: list[str] = []
    ways = {name: lambda name=name: seen.append(name) for name in "abc"}
    assert all(len(found) == 3 for found in in_turns(ways, 3).values())
    assert "".join(seen) == "abccbaabc"


def test_sampling_stops_after_its_time_but_not_before_the_fewest_rounds() -> None:
    sampling = Sampling(0.0, most_calls=1, fewest_rounds=2, most_rounds=5)
    calls = {"a": lambda: None, "b": lambda: None}
    assert [len(one) for one in sample_in_turns(calls, sampling).values()] == [5, 5]
    assert [len(one) for one in sample_in_turns(calls, sampling, limit_s=0).values()] == [2, 2]


def test_progress_of_parts_is_that_of_the_section() -> None:
    said: list[tuple[float, str]] = []
    study = Study(quick=False, report=lambda done, text: said.append((done, text)))
    with study.part(0.5, 1.0):
        assert list(study.each([("a", 1), ("b", 2)])) == [("a", 1), ("b", 2)]
    study.say(1.0, "done")
    assert said == [(0.5, "a, 1"), (0.75, "b, 2"), (1.0, "done")]
    assert study.pick(5, 1) == 5


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (3, "3"),
        (1 / 3, "0.3333"),
        (summarise([2.0, 2.5, 4.0]), "2.5 (2 to 4)"),
        ({"value": 80.0, "low": 72.0, "high": 91.0}, "80 (72 to 91)"),
        ({"gateway": 1.5, "dispatcher": 2.0}, "gateway 1.5, dispatcher 2"),
        ([64, 96], "64, 96"),
    ],
)
def test_figures_are_written_by_their_kind(figure: object, text: str) -> None:
    assert figure_text(figure) == text


def test_sections_are_printed_with_all_their_parts_and_drawn(tmp_path: Path) -> None:
    study = Study(quick=True)
    study.found["what"] = "one thread"
    for px, speed_up in ((64, 2.0), (96, 3.0)):
        study.row("ways", way="engine", px=px, speed_up=summarise([speed_up]))
    study.row("ways", way="static", images=8)
    study.at_most("overhead", 5.0, {"value": 1.2, "low": 1.0, "high": 1.5}, "%")
    study.note("left out: [this]")
    study.fail("images differ")
    console = Console(record=True, width=120)
    print_sections(console, {"engine": study.found}, quick=True)
    written = console.export_text()
    for part in ("one thread", "ways", "speed up", "static", "at most 5 %", "1.00 to 1.50"):
        assert part in written
    assert "left out: [this]" in written
    assert "FAILED images differ" in written
    assert has_problems({"engine": study.found})
    assert not has_problems({"engine": Study(quick=True).found})
    about = {"machine": {"cpu": "x"}, "started": "2026-11-26T00:00:00", "commit": "none"}
    plot = Plot("ways", "px", ("speed_up",), ("way",), is_log=True)
    draw(about, [(study.found, plot)], tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000
    found = json.loads(as_json({"a": [float("inf"), float("nan"), 1.5], "b": (1, True)}))
    assert found == {"a": ["inf", "nan", 1.5], "b": [1, True]}
