"""The benchmark of edits compares equal work, and would tell if it were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import StableDiffusionInpaintPipeline

from benchmarks.edits import handling
from benchmarks.edits.__main__ import main
from benchmarks.edits.settings import EditSettings
from benchmarks.edits.subject import FACTOR, by_inpainting, edit_requests, mask, pixels_of
from benchmarks.engine.streams import TOLERANCE, by_engine
from benchmarks.engine.subject import Subject, largest_difference, load_subject

PX = 64


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject()


@pytest.fixture(scope="module")
def pipeline(subject: Subject) -> Any:
    found = StableDiffusionInpaintPipeline(
        **subject.pipeline.components, requires_safety_checker=False
    )
    found.set_progress_bar_config(disable=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_engine_and_pipeline_make_the_same_edits(
    subject: Subject, pipeline: Any, strength: float
) -> None:
    requests = edit_requests(4, px=PX, num_steps=5, guidance_scale=2.0, strength=strength)
    pixels = pixels_of(requests)
    theirs = by_inpainting(pipeline, requests, pixels)
    ours = by_engine(subject, requests, 4, pixels=pixels)
    assert ours.keys() == {one.request_id for one in requests}
    assert largest_difference(theirs, ours) <= TOLERANCE
    other = dict(zip(pixels, [*pixels.values()][1:] + [*pixels.values()][:1], strict=True))
    assert largest_difference(theirs, by_engine(subject, requests, 4, pixels=other)) > 20


def test_masks_are_of_whole_latent_pixels_and_differ() -> None:
    masks = [mask(PX, index) for index in range(4)]
    for one in masks:
        assert one.any()
        assert not one.all()
        coarse = one[::FACTOR, ::FACTOR].repeat(FACTOR, 0).repeat(FACTOR, 1)
        assert np.array_equal(one, coarse)
    assert len({one.tobytes() for one in masks}) == 4


def test_every_part_of_the_handling_is_timed() -> None:
    section = handling.measure(
        EditSettings(sizes_px=(32, 64), handling_rounds=2), lambda _done, _text: None
    )
    [rows] = section["tables"].values()
    assert [row["px"] for row in rows] == [32, 64]
    for row in rows:
        figures = [figure for name, figure in row.items() if name.endswith("_ms")]
        assert len(figures) == 6
        assert all(figure["n"] == 2 and figure["median"] > 0 for figure in figures)


@pytest.mark.slow
def test_a_quick_run_writes_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "edits.json"
    assert main(["--quick", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["quick"]
    assert {"machine", "commit", "versions", "load_before", "load_after"} <= result.keys()
    rows = result["sections"]["speed"]["tables"]["edits in flight"]
    assert len(rows) == 8
    assert all(row["speed_up_cpu"]["median"] > 0 for row in rows)
    assert path.with_suffix(".png").is_file()
    assert "edits in flight" in capsys.readouterr().out
