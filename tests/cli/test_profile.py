"""``ray-cluster profile`` measures the real engine, and refuses what it cannot measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster.policies.latency import OperationKey
from ray_cluster.profiles.files import load_profile
from tests.cli.conftest import Cli


def test_it_measures_what_it_is_asked_and_writes_a_profile(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    result = cli(
        *("profile", "--sizes", "64x64,128x128", "--batches", "4,1", "--repeats", 3, "-o", path)
    )
    assert result.exit_code == 0, result.output
    assert f"written: {path}" in result.stdout.replace("\n", "")
    profile = load_profile(path)
    assert (profile.model, profile.kinds) == ("shapes-sd", ("measured",))
    assert len(profile.of("step")) == 8
    assert len(profile.of("decode")) == 4
    assert len(profile.of("encode")) == 4
    assert len(profile.of("load")) == 1
    alone, together, large, guided = (
        profile.find(key)
        for key in (
            OperationKey("step", 64, 64),
            OperationKey("step", 64, 64, batch=4),
            OperationKey("step", 128, 128, batch=4),
            OperationKey("step", 64, 64, batch=4, uses_guidance=True),
        )
    )
    assert alone is not None
    assert together is not None
    assert large is not None
    assert guided is not None
    assert all(0 < row.seconds < 60 for row in profile.rows)
    # four times the pixels and twice the rows, with room for what else the machine does
    assert large.seconds > together.seconds
    assert together.seconds < 4 * alone.seconds * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sizes", "64"], "'64' is none; write WIDTHxHEIGHT"),
        (["--sizes", "64x64,65x64"], "'65x64' is none"),
        (["--sizes", "64x9999"], "'64x9999' is none"),
        (["--batches", "0"], "whole numbers from 1 to 1024"),
        (["--batches", "1;2"], "whole numbers from 1 to 1024"),
        (["--out", "a.json"], "ends in .yaml"),
        (["--out", "nosuch/a.yaml"], "there is no folder"),
        (["--pool", "nosuch"], "nosuch"),
        (["--model", "nosuch"], "nosuch"),
    ],
)
def test_a_wrong_option_is_one_sentence(cli: Cli, arguments: list[str], sentence: str) -> None:
    result = cli("profile", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
