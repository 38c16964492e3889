"""How long short calls take: CPU time of the thread, or the device's own clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.stopwatch import Stopwatch

_SAMPLE_S = 2e-3
_MOST_CALLS = 1000


def seconds_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Time all calls in every round, each round in the other order than the one before.

    Returns:
        By name, the seconds of one call in each round: a sample is as many calls as take 2 ms.
    """
    timer = cuda_seconds if device == "cuda" else cpu_seconds
    for call in calls.values():
        # the first call of all may compile
        call()
    about = {name: max(timer(call, 3) / 3, 1e-7) for name, call in calls.items()}
    numbers = {name: min(_MOST_CALLS, int(_SAMPLE_S / one) + 1) for name, one in about.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(timer(calls[name], numbers[name]) / numbers[name])
    return samples


def cpu_seconds(call: Callable[[], Any], count: int) -> float:
    """CPU seconds of this thread for so many calls."""
    with Stopwatch() as watch:
        for _ in range(count):
            call()
    return watch.cost.cpu_s


def cuda_seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds on the device from the first of so many calls to the end of the last."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
