"""What batches really take is learnt, as mean and spread."""

from __future__ import annotations

import numpy as np
import pytest

from ray_cluster.policies.planning.cluster_state import BatchTimes, observe_batch


def after(ratios: list[float]) -> BatchTimes:
    times = BatchTimes()
    for ratio in ratios:
        times = observe_batch(times, took_s=2.0 * ratio, expected_s=2.0)
    return times


def test_as_long_as_nothing_is_forgotten_it_is_mean_and_spread_with_the_prior() -> None:
    ratios = np.random.default_rng(0).lognormal(0.0, 0.3, 400)
    times = after(ratios.tolist())
    every = np.concatenate([np.ones(10), ratios])
    assert times.mean == pytest.approx(every.mean())
    assert times.spread == pytest.approx(every.std() / every.mean())


def test_even_batches_spread_nothing_and_old_ones_are_forgotten() -> None:
    assert after([1.0] * 50) == BatchTimes(60, 1.0, 0.0)
    changed = after([0.5, 1.5] * 500 + [2.0] * 5000)
    assert changed.mean == pytest.approx(2.0, rel=1e-3)
    assert changed.spread < 0.02


def test_a_batch_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="take time"):
        observe_batch(BatchTimes(), took_s=0.0, expected_s=1.0)
