"""What is made of the samples: no speed-up for wrong images, aims judged by their interval."""

import numpy as np
import pytest

from benchmarks.aims import check_aims
from benchmarks.engine.speed import contender_result
from benchmarks.engine.subject import largest_difference
from benchmarks.serving.overhead import split
from benchmarks.stats import summarise
from benchmarks.stopwatch import Cost, Stopwatch


def cost(seconds: float) -> Cost:
    return Cost(cpu_s=seconds, wall_s=2 * seconds, process_s=seconds)


def test_speed_up_is_what_one_by_one_costs_over_what_it_cost() -> None:
    result = contender_result("engine 8", [cost(0.1)] * 3, [cost(0.25)] * 3, difference=1)
    assert result["speed_up_cpu"]["median"] == pytest.approx(2.5)
    assert (result["kind"], result["in_flight"]) == ("engine", 8)


@pytest.mark.parametrize("difference", [2, 255, None])
def test_no_speed_up_where_images_differ_or_were_not_compared(difference: int | None) -> None:
    result = contender_result("engine 8", [cost(0.1)], [cost(0.25)], difference)
    assert not result["images_equal"]
    assert "speed_up_cpu" not in result
    assert "speed_up_wall" not in result


def test_difference_is_the_largest_over_common_images_and_has_no_overflow() -> None:
    dark, light = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    almost = dark.copy()
    almost[1, 1, 2] = 1
    assert largest_difference({"a": dark, "b": dark}, {"a": almost, "c": light}) == 1
    assert largest_difference({"a": dark, "b": dark}, {"a": dark, "b": light}) == 255
    with pytest.raises(ValueError, match="nothing to compare"):
        largest_difference({"a": dark}, {"b": dark})


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [([1.02] * 5, "yes"), ([1.09] * 5, "no"), ([1.01, 1.02, 1.04, 1.08, 1.09], "unsure")],
)
def test_aim_is_judged_by_the_whole_interval(ratios: list[float], verdict: str) -> None:
    ratio = summarise(ratios)
    case = {"batch": 8, "guidance": False, "ratio": ratio.as_dict(), "share": ratio.median - 1}
    (aim,) = check_aims({"overhead": {"cases": [case]}})
    assert aim.verdict == verdict


def test_parts_of_the_service_overhead_add_up() -> None:
    timing = {"queue_s": 0.01, "encode_s": 0.02, "denoise_s": 0.3, "decode_s": 0.03}
    parts = split([0.5], [{**timing, "total_s": 0.4}])
    medians = {name: figures["median"] for name, figures in parts.items()}
    assert medians["overhead"] == pytest.approx(0.5 - 0.35)
    assert medians["overhead"] == pytest.approx(
        medians["lease"] + medians["code_and_report"] + medians["http"]
    )


def test_stopwatch_counts_work_and_not_sleep() -> None:
    import time

    with Stopwatch() as watch:
        time.sleep(0.05)
    assert watch.cost.wall_s >= 0.05
    assert watch.cost.cpu_s < 0.04
