"""The GPU suite, with tiny models on a CPU: what does not need a GPU works here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import exactness, parts
from benchmarks.gpu.families import Family, published, tiny
from benchmarks.gpu.pipeline import Denoiser
from benchmarks.gpu.profile import profile_of
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Settings, tiny_settings
from benchmarks.gpu.steps import CHANNELS_LAST, COMPILED, EAGER, OURS, measure_compiled
from benchmarks.gpu.subject import Contest, executor_of
from benchmarks.tables import has_problems
from ray_cluster.engine.unet import parts as unet_parts
from ray_cluster.models.latency_profiles import load_profile

ROOT = Path(__file__).resolve().parents[2]
# as the models' cards and configurations have them
NUM_WEIGHTS = {"sdxl": 2_567_463_684, "sd3": 2_028_328_000, "flux": 11_901_408_320}
BLOCKED = ("ray", "fastapi", "sqlalchemy", "ortools", "pydantic", "transformers.models.clip")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return tiny_settings("blocks", "cpu")


def run_suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it where none of the service's own needs can be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))\n"
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'pydantic' else found(name, *more)\n"
        f"from benchmarks.gpu.__main__ import main; raise SystemExit(main({list(arguments)}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_runs_without_ray_and_writes_results_and_profiles(tmp_path: Path) -> None:
    # the other family runs in the tests below
    done = run_suite(
        *("--device", "cpu", "--tiny", "--compile", "none"),
        *("--only", "kernels,sdxl,flux,whole"),
        *("--budget-s", "1000", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("tiny-cpu-*.json")
    result = json.loads(path.read_text())
    assert list(result["parts"]) == ["kernels", "sdxl", "flux", "whole"]
    left_out = [
        note
        for part in result["parts"].values()
        for section in part.values()
        for note in section.get("notes", ())
    ]
    assert {note.partition(" (")[0].removeprefix("left out: ") for note in left_out} == {
        *("attention at once", "CUDA graphs", "diffusers compiled"),
        "whole pipelines",
    }
    kernels = result["parts"]["kernels"]
    assert {row["op"] for row in kernels["ops"]["tables"]["ops"]} >= {"geglu", "group_norm_silu"}
    attention = kernels["attention"]["tables"]["attention of packed sequences"]
    assert {len(set(row["sides_px"])) for row in attention} == {1, 2}
    families = [one for one in tiny() if one.name in result["parts"]]
    for family in families:
        part = result["parts"][family.name]
        rows = part["steps"]["tables"]["steps of one size"]
        last = {CHANNELS_LAST} if family.is_unet else set()
        assert {row["by"] for row in rows} == {OURS, EAGER, *last}
        assert all(row["speed_up"]["median"] == 1 for row in rows if row["by"] == EAGER)
        assert len(part["mixes"]["tables"]["layouts"]) == 2
    assert "--profiles-of" in done.stdout
    assert suite.main(["--profiles-of", str(path)]) == 0
    for family in families:
        profile = load_profile(path.with_name(f"{path.stem}-{family.name}.yaml"))
        assert profile.kinds == ("measured",)
        assert result["commit"] in profile.rows[0].source
        steps = profile.of("step")
        assert {row.key.batch for row in steps if not row.key.beside} == {1, 2}
        assert {row.key.num_images for row in steps if row.key.beside} == {2, 3}
        assert {row.key.uses_guidance for row in profile.rows} == {not family.embeds_guidance}


@pytest.mark.slow
def test_whole_pipelines_are_planned_run_and_timed(settings: Settings, tmp_path: Path) -> None:
    record = Record(tmp_path / "part.json", 1000.0)
    parts.run_part("whole", settings, record)
    found = record.sections
    assert {name: one.get("problems") for name, one in found.items()} == dict.fromkeys(
        ("sdxl, memory", "sdxl, stages at once", "sdxl, decoding", "flux, memory")
    )
    for name in settings.wholes:
        [memory] = found[f"{name}, memory"]["tables"]["memory"]
        assert 0 < memory["planned_weights_gib"] < memory["planned_peak_gib"]
    stages = found["sdxl, stages at once"]["tables"]
    assert {one["batch"] for one in stages["steps"]} == {settings.batches[-1]}
    assert all(one["ms"]["n"] >= 4 for one in stages["steps"]), stages
    assert stages["inflation"][0]["step_over_alone"] > 0
    assert {one["when"] for one in stages["to the end of the first step"]} == {"idle", "busy"}
    decoding = found["sdxl, decoding"]["tables"]["decoding"]
    assert [row["by"] for row in decoding] == ["channels first", "as it is loaded"]


@pytest.mark.timeout(600)
def test_a_process_that_dies_or_hangs_is_told() -> None:
    assert suite.run_isolated(sys.exit, [0], 500.0) == ""
    assert suite.run_isolated(sys.exit, [3], 500.0).endswith("status 3")
    assert suite.run_isolated(time.sleep, [600], 0.1).startswith("stopped")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main([]) == 2
    error = capsys.readouterr().err
    assert "CUDA device" in error
    assert "--device cpu --tiny" in error
    assert suite.main(["--device", "cpu"]) == 2


@pytest.mark.parametrize("family", published(), ids=lambda one: one.name)
def test_a_published_model_has_its_weights(family: Family) -> None:
    model = family.build("meta", torch.bfloat16)
    assert sum(one.numel() for one in model.parameters()) == NUM_WEIGHTS[family.name]


@pytest.mark.parametrize("family", tiny(), ids=lambda one: one.name)
def test_a_model_call_needs_nothing_from_the_host(
    family: Family, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without data: a tensor that is elsewhere, or is read by the host, is an error."""
    calls = []

    def norm(rows: Tensor, bounds: Tensor, *_settings: Any, silu: bool) -> Tensor:
        assert rows.is_contiguous()
        assert rows.is_meta
        assert bounds.is_meta
        calls.append(silu)
        return torch.empty_like(rows)

    monkeypatch.setattr(unet_parts, "has_row_norm", lambda _norm: True)
    monkeypatch.setattr(unet_parts, "group_norm_silu", norm)
    across = "ray_cluster.engine.dit.executor.attention_for"
    monkeypatch.setattr(across, lambda _device, _dtype: "at once")
    with torch.inference_mode():
        model = family.build("meta", torch.bfloat16)
        call = exactness.make_call(settings, Denoiser(family, model))
        found = exactness.by_ours(executor_of(family, model), call)
    assert [one.shape for one in found] == [one.shape for one in call.latents]
    assert bool(calls) == family.is_unet


def contest_of(settings: Settings, name: str) -> Contest:
    family = settings.family(name)
    model = family.build("cpu", settings.dtype)
    return Contest(family, Denoiser(family, model), executor_of(family, model))


@pytest.mark.parametrize("spoilt", ["ours", "control", "nan"])
def test_wrong_predictions_fail_and_get_no_ratio_and_no_profile(
    spoilt: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = exactness.by_ours

    def wrong(executor: Any, call: Any) -> list[Tensor]:
        return [one * 1.5 for one in real(executor, call)]

    def no_number(*_args: Any) -> Tensor:
        return torch.full((8, 8, 8), float("nan"))

    if spoilt == "ours":
        monkeypatch.setattr(exactness, "by_ours", wrong)
    elif spoilt == "nan":
        monkeypatch.setattr(exactness, "by_diffusers", no_number)
        # a right executor of a model whose every prediction is no number
        shapes = lambda _executor, call: [no_number() for _ in call.latents]  # noqa: E731
        monkeypatch.setattr(exactness, "by_ours", shapes)
    else:
        same = property(lambda call: call)
        monkeypatch.setattr(exactness.Call, "wrong_timestep", same)
    record = Record(tmp_path / "part.json", 1000.0)
    few = replace(settings, batches=(1,), mixes={}, compile_kind="none")
    parts.run_part("sd3", few, record)
    assert record.sections["exactness"]["status"] == "failed"
    rows = record.sections["steps"]["tables"]["steps of one size"]
    assert {row["by"] for row in rows} == {OURS, EAGER}
    assert not any("speed_up" in row for row in rows)
    assert profile_of("sd3", record.sections, device="d", source="s") is None
    assert has_problems(record.sections)


def test_a_broken_section_costs_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(parts, "check_graphs", broken)
    monkeypatch.setattr(parts, "measure_mixes", broken)
    record = Record(tmp_path / "part.json", 1000.0)
    parts.run_part("flux", replace(settings, batches=(1,), compile_kind="none"), record)
    found = json.loads((tmp_path / "part.json").read_text())
    assert {name: section["status"] for name, section in found.items()} == {
        "model": "ok",
        "exactness": "ok",
        "graphs": "failed",
        "steps": "ok",
        "mixes": "failed",
        "compiled": "partial",
    }
    assert "an illegal memory access" in found["graphs"]["problems"][0]


def test_what_there_is_no_time_for_is_left_out_and_told(settings: Settings, tmp_path: Path) -> None:
    record = Record(tmp_path / "part.json", 0.0)
    parts.run_part("sd3", settings, record)
    section = record.sections["steps"]
    assert section["tables"] == {"steps of one size": []}
    assert "left out: side_px 64, batch 1 (no time left)" in section["notes"]


def test_the_compiled_model_is_measured_and_is_itself_again(
    settings: Settings, tmp_path: Path
) -> None:
    contest = contest_of(settings, "sd3")
    record = Record(tmp_path / "part.json", 1000.0)
    with record.section("compiled") as section:
        measure_compiled(settings, contest, section, is_exact=True)
    rows = record.sections["compiled"]["tables"]["steps beside diffusers compiled"]
    assert [row["by"] for row in rows] == [COMPILED, OURS]
    assert not any(_is_compiled(one) for one in contest.denoiser.model.modules())


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None
