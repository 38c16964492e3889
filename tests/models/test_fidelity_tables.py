"""The tables of steps that ship are those that were measured, of these weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ray_cluster.cli.models.calibrate_run import denoiser_hash
from ray_cluster.config.sections.pools import FidelityConfig, PoolConfig
from ray_cluster.models.builtin import BUILTIN_MODELS, builtin_folder
from ray_cluster.models.fidelity_tables import builtin_table_file, step_table
from ray_cluster.policies.fidelity import LEAST_SSIM

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = [model for model in BUILTIN_MODELS if builtin_table_file(model).is_file()]


@pytest.mark.parametrize("model", MEASURED)
def test_a_shipped_table_is_the_one_that_was_measured_of_these_weights(model: str) -> None:
    shipped = builtin_table_file(model).read_text(encoding="utf-8")
    newest = max(RESULTS.glob(f"fidelity-*/{model}.json"))
    assert shipped == newest.read_text(encoding="utf-8")
    folder = builtin_folder(model)
    assert folder is not None
    assert json.loads(shipped)["weights_sha256"] == denoiser_hash(folder)


@pytest.mark.parametrize("model", MEASURED)
def test_a_shipped_table_saves_steps_and_keeps_the_bars(model: str) -> None:
    table = step_table(PoolConfig(name="pool", model=model))
    assert table is not None
    row = table.row(20)
    assert row is not None
    assert row.fast < row.balanced < 20
    for one in table.rows:
        assert one.balanced_ssim >= LEAST_SSIM["balanced"]
        assert one.fast_ssim >= LEAST_SSIM["fast"]


def test_what_was_not_measured_has_no_table() -> None:
    assert {"shapes-sd", "shapes-sd3"} <= set(MEASURED)
    for model in ("someone/shapes-sd", "/models/shapes-sd", "../shapes-sd", "sdxl"):
        assert step_table(PoolConfig(name="pool", model=model)) is None


ROW = {"asked": 20, "balanced": 8, "fast": 5}


def test_the_configurations_table_comes_before_the_shipped_one() -> None:
    own = {"sampler": "euler", "max_guidance_scale": 5.0, "steps": [ROW]}
    pool = PoolConfig.model_validate({"name": "p", "model": "shapes-sd", "fidelity": own})
    table = step_table(pool)
    assert table is not None
    assert (table.sampler, table.rows[0].balanced) == ("euler", 8)
    # what nobody says was measured is no better than promised
    assert table.rows[0].balanced_ssim == LEAST_SSIM["balanced"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "at least 1 item"),
        ([{**ROW, "fast": 9}], "between fast and asked; given fast 9, balanced 8"),
        ([{**ROW, "balanced": 21}], "balanced 21, asked 20"),
        ([{**ROW, "fast_ssim": 0.8}], "greater than or equal to 0.85"),
        ([ROW, ROW], "ordered by asked; given 20 after 20"),
        ([ROW, {"asked": 30, "balanced": 7, "fast": 5}], "fewer for asked 30 than for 20"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(steps: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        FidelityConfig.model_validate(
            {"sampler": "ddim", "max_guidance_scale": 2.0, "steps": steps}
        )
    assert said in str(caught.value)
