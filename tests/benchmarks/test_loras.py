"""The benchmark of LoRAs compares equal work, and would tell if it were not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine.streams import BASELINE, TOLERANCE, by_engine
from benchmarks.engine.subject import largest_difference, load_subject, make_requests
from benchmarks.loras.__main__ import main
from benchmarks.loras.images import KEPT, LOADED, ways_of
from benchmarks.loras.settings import quick_lora_settings
from benchmarks.loras.subject import chosen, different, read_styles
from ray_cluster.engine.adapters.factors import write_factors


@pytest.mark.slow
def test_every_way_makes_the_images_that_diffusers_makes(tmp_path: Path) -> None:
    subject, settings = load_subject(), replace(quick_lora_settings(), num_steps=4)
    for style, factors in read_styles().items():
        write_factors(factors, tmp_path / style)
    ways = ways_of(subject, tmp_path, settings, per_request=2, in_flight=3)
    made = {name: way.call() or {} for name, way in ways.items()}
    assert made.keys() == {BASELINE, KEPT, LOADED}
    for images in made.values():
        assert largest_difference(made[BASELINE], images) <= TOLERANCE
    bare = make_requests(3, px=settings.px, num_steps=4, guidance_scale=1)
    assert largest_difference(made[BASELINE], by_engine(subject, bare, 3)) > 20


def test_loras_differ_and_have_the_ranks_that_they_are_named_for() -> None:
    styles = read_styles()
    assert [one.ranks for one in styles.values()] == [(4,), (8,), (16,)]
    several = different(styles["texture"], 3)
    assert several[0] is styles["texture"]
    assert {one.ranks for one in several} == {(16,)}
    paths = [one.by_component["unet"] for one in several]
    assert paths[0].keys() == paths[1].keys()
    name = next(iter(paths[0]))
    assert len({float(one[name].shrink.sum()) for one in paths}) == 3
    assert [len(one) for one in chosen(2, 4)] == [2] * 4
    assert chosen(0, 1) == [{}]


@pytest.mark.slow
def test_a_quick_run_writes_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loras.json"
    assert main(["--quick", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    tables = {
        key: value for one in result["sections"].values() for key, value in one["tables"].items()
    }
    assert len(tables["steps with LoRAs"]) == 16
    assert all(row["over_base"]["median"] > 0 for row in tables["steps with LoRAs"])
    assert len(tables["requests with LoRAs in flight"]) == 6
    assert len(tables["ms of one LoRA"]) == 3
    assert path.with_suffix(".png").is_file()
    assert "steps with LoRAs" in capsys.readouterr().out
