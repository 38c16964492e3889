"""Times calls of very different lengths in turns, within a time that is set beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.timing import cpu_seconds, cuda_seconds
from benchmarks.stats import paired_ratio, summarise

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How often calls are timed.

    Attributes:
        sample_s: a sample is as many calls as take this long, up to ``most_calls``.
        fewest_rounds: samples of each call even if the time is over.
        most_rounds: samples of each call however much time is left.
    """

    sample_s: float = 0.03
    most_calls: int = 20
    fewest_rounds: int = 3
    most_rounds: int = 15

    @property
    def most_in_all(self) -> int:
        """How often a call is made at most."""
        return 2 + self.most_calls * self.most_rounds


def sample_in_turns(
    calls: Mapping[str, Callable[[], Any]],
    limit_s: float,
    device: torch.device,
    sampling: Sampling,
) -> Samples:
    """Time every call in each round, each round in the other order than the one before.

    Before, each is called twice: what it compiles or captures is not in the figures. On CUDA a
    sample is what lies between two events around its calls, waiting for the host included; on a
    CPU it is CPU time of the thread.

    Args:
        limit_s: after which no further round begins, beyond the fewest.

    Returns:
        By name, the seconds of one call in each round.
    """
    timer = cuda_seconds if device.type == "cuda" else cpu_seconds
    counts = {}
    started_s = time.monotonic()
    for name, call in calls.items():
        call()
        about_s = max(timer(call, 1), 1e-6)
        counts[name] = min(sampling.most_calls, 1 + int(sampling.sample_s / about_s))
    samples: Samples = {name: [] for name in calls}
    for turn in range(sampling.most_rounds):
        if turn >= sampling.fewest_rounds and time.monotonic() - started_s > limit_s:
            break
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(timer(calls[name], counts[name]) / counts[name])
    return samples


def compared(samples: Samples, baseline: str, *, is_exact: bool) -> dict[str, Any]:
    """Return figures by name: seconds, and how many times as fast as the baseline, pair by pair.

    Args:
        is_exact: whether the results are known to be right; there is no ratio of wrong ones.
    """
    found: dict[str, Any] = {}
    for name, seconds in samples.items():
        found[name] = {"seconds": summarise(seconds).as_dict()}
        if is_exact:
            found[name]["speed_up"] = paired_ratio(samples[baseline], seconds).as_dict()
    return found
