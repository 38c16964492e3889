"""The comparison of discriminators says who is better, and by how much."""

import numpy as np
import pytest
import torch

from benchmarks.discriminators import IMAGE_ONLY, LENGTH, OURS, RANDOM, judge
from benchmarks.harness import Study
from ray_cluster.quality.suite import suite_prompts
from recipes.discriminators.figures import Trial


def test_one_that_knows_is_above_chance_and_prompt_length_and_is_counted_right() -> None:
    count, rng = 200, np.random.default_rng(2)
    prompts = tuple(one for kind in ("easy", "hard") for one in suite_prompts(kind, count))
    right = np.concatenate([rng.random(count) < 0.9, rng.random(count) < 0.3])
    everything = np.ones(2 * count, bool)
    trial = Trial(prompts, torch.zeros(2 * count, 3, 1, 1), right, everything, everything)
    length = -np.array([float(len(text.split())) for text in trial.captions])
    knowing = np.where(right, 0.6, 0.3) + 0.2 * rng.random(2 * count)
    confidences = {
        OURS: knowing,
        IMAGE_ONLY: rng.random(2 * count),
        LENGTH: length,
        RANDOM: np.zeros(2 * count),
    }
    study = Study(quick=True)
    judge(study, trial, confidences, lambda threshold: threshold - 0.2)
    section = study.found
    verdicts = {aim["name"]: aim["verdict"] for aim in section["aims"]}
    assert {verdicts[f"above {name} at 0.3"] for name in (LENGTH, RANDOM)} == {"yes"}
    [gap] = (aim["measured"] for aim in section["aims"] if "threshold" in aim["name"])
    assert gap == pytest.approx(100 * ((~right).mean() - 0.3))
    rows = section["tables"]["all right, by who decides"]
    assert rows[0][OURS] == rows[0][RANDOM] == pytest.approx(right.mean())
    assert rows[-1][LENGTH] == pytest.approx(1)
    assert rows[5][RANDOM] == pytest.approx((1 + right.mean()) / 2)
    # all that is wrong
    assert rows[5][OURS] == pytest.approx(1)
    areas = {row["contender"]: row["area_all"] for row in section["tables"]["contenders"]}
    assert areas[OURS] == 1
    assert areas[RANDOM] == 0.5
