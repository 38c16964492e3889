"""Tables and aims as they are written, and ways that are compared in turns."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from benchmarks import stopwatch
from benchmarks.engine.streams import BASELINE, Images, Way, compare
from benchmarks.engine.subject import largest_difference
from benchmarks.report import as_json, figure_text, has_problems, markdown_report, print_sections
from benchmarks.serving.service import split
from benchmarks.stats import summarise
from benchmarks.stopwatch import Sampling, Stopwatch, in_turns, sample_in_turns
from benchmarks.verdicts import at_most


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (3, "3"),
        (1 / 3, "0.3333"),
        (summarise([2.0, 2.5, 4.0]).as_dict(), "2.5 (2 to 4)"),
        ({"value": 80.0, "low": 72.0, "high": 91.0}, "80 (72 to 91)"),
        ({"gateway": 1.5, "dispatcher": 2.0}, "gateway 1.5, dispatcher 2"),
        ([64, 96], "64, 96"),
    ],
)
def test_figures_are_written_by_their_kind(figure: object, text: str) -> None:
    assert figure_text(figure) == text


def test_sections_are_printed_and_written_with_all_their_parts() -> None:
    aim = at_most("overhead", 5.0, 1.2, (1.0, 1.5), "%").as_dict()
    rows = [{"way": "engine", "speed_up": 2.0}, {"way": "static", "images": 8}]
    section = {
        "what": "one thread",
        "tables": {"ways": rows},
        "aims": [aim],
        "notes": ["left out: [this]"],
        "problems": ["images differ"],
    }
    console = Console(record=True, width=120)
    print_sections(console, {"engine": section}, quick=True)
    text = markdown_report("Title", ["a head"], {"engine": section})
    for written in (console.export_text(), text):
        for part in ("one thread", "ways", "speed up", "static", "at most 5 %", "1.00 to 1.50"):
            assert part in written
        assert "left out: [this]" in written
        assert "FAILED images differ" in written
    assert "| engine | 2 | - |\n| static | - | 8 |" in text
    assert has_problems({"engine": section})
    assert not has_problems({"engine": {"tables": {}}})


def test_figures_that_json_lacks_are_words() -> None:
    found = json.loads(as_json({"a": [float("inf"), float("nan"), 1.5], "b": (1, True)}))
    assert found == {"a": ["inf", "nan", 1.5], "b": [1, True]}


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.02] * 5, "yes"), ([1.09] * 5, "no"), ([1.01, 1.02, 1.04, 1.08, 1.09], "unsure")],
)
def test_aim_is_judged_by_the_whole_interval(ratios: list[float], verdict: str) -> None:
    ratio = summarise(ratios)
    assert at_most("overhead", 1.05, ratio.median, ratio.ci95, "x").verdict == verdict


def images(value: int) -> Callable[[], Images]:
    return lambda: {"a": np.full((2, 2, 3), value, np.uint8)}


def test_only_images_of_the_baseline_get_a_speed_up() -> None:
    ways = {
        BASELINE: Way(images(0), 1),
        "right": Way(images(1), 2),
        "wrong": Way(images(9), 1),
        "rounded": Way(images(9), 1, is_exact=False),
        "bare": Way(lambda: None, 1),
    }
    rows, problems = compare(ways, rounds=2)
    found = {row["way"]: row for row in rows}
    assert {name for name, row in found.items() if "speed_up_cpu" in row} == {
        *("right", "rounded", "bare")
    }
    assert found["wrong"]["largest_difference_255"] == 9
    assert problems == ["wrong: images differ by 9/255, allowed 1"]


def test_difference_is_the_largest_over_common_images_and_has_no_overflow() -> None:
    dark, light = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    almost = dark.copy()
    almost[1, 1, 2] = 1
    assert largest_difference({"a": dark, "b": dark}, {"a": almost, "c": light}) == 1
    assert largest_difference({"a": dark, "b": dark}, {"a": dark, "b": light}) == 255
    with pytest.raises(ValueError, match="nothing to compare"):
        largest_difference({"a": dark}, {"b": dark})


def test_order_of_ways_alternates() -> None:
    seen: list[str] = []
    ways = {name: lambda name=name: seen.append(name) for name in "abc"}
    costs = in_turns(ways, 3)
    assert "".join(seen) == "abccbaabc"
    assert all(len(found) == 3 for found in costs.values())


def test_sampling_stops_after_its_time_but_not_before_the_fewest_rounds() -> None:
    sampling = Sampling(0.0, most_calls=1, fewest_rounds=2, most_rounds=5)
    calls = {"a": lambda: None, "b": lambda: None}
    assert [len(one) for one in sample_in_turns(calls, sampling).values()] == [5, 5]
    assert [len(one) for one in sample_in_turns(calls, sampling, limit_s=0).values()] == [2, 2]


def test_stopwatch_reads_its_three_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1.0, 10.0, 100.0), (1.5, 13.0, 102.0)])
    monkeypatch.setattr(stopwatch, "_now", lambda: next(readings))
    with Stopwatch() as watch:
        pass
    cost = watch.cost.per(2)
    assert (cost.cpu_s, cost.wall_s, cost.process_s) == (0.25, 1.5, 1.0)


def test_parts_of_the_service_overhead_add_up() -> None:
    timing = {"queue_s": 0.01, "encode_s": 0.02, "denoise_s": 0.3, "decode_s": 0.03}
    parts = split([0.5], [{**timing, "total_s": 0.4}])
    medians = {name: figures["median"] for name, figures in parts.items()}
    assert medians["overhead"] == pytest.approx(1e3 * (0.5 - 0.35))
    assert medians["overhead"] == pytest.approx(
        medians["lease"] + medians["code_and_report"] + medians["http"]
    )
