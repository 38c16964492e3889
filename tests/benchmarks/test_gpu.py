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
from benchmarks.gpu.record import Record, as_json
from benchmarks.gpu.report import has_failed, notes
from benchmarks.gpu.settings import WEIGHTS, Settings, tiny_settings
from benchmarks.gpu.steps import COMPILED, EAGER, OURS, measure_compiled
from benchmarks.gpu.subject import Contest, executor_of
from ray_cluster.engine import packed_weights
from ray_cluster.engine.unet import parts as unet_parts
from ray_cluster.models.profiles import load_profile

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
        timeout=170,
        check=False,
    )


def test_the_whole_suite_runs_without_ray_and_writes_results_and_profiles(tmp_path: Path) -> None:
    done = run_suite(
        *("--device", "cpu", "--tiny", "--compile", "none", "--commit", "abc"),
        *("--budget-s", "1000", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("tiny-cpu-*.json")
    result = json.loads(path.read_text())
    assert set(result["parts"]) == set(suite._PARTS) == set(WEIGHTS)
    assert {one["what"] for one in _left_out(result)} == {
        *("attention at once", "CUDA graphs", "diffusers compiled")
    }
    for family in tiny():
        part = result["parts"][family.name]
        for cell in part["steps"]["cells"]:
            assert cell["contenders"][OURS]["speed_up"]["median"] > 0
            assert cell["contenders"][EAGER]["speed_up"]["median"] == 1
        assert all(cell["layout"] in ("mixed", "grouped") for cell in part["mixes"]["cells"])
    assert "--profiles-of" in done.stdout
    assert suite.main(["--profiles-of", str(path)]) == 0
    for family in tiny():
        profile = load_profile(path.with_name(f"{path.stem}-{family.name}.yaml"))
        assert profile.kinds == ("measured",)
        assert "commit abc" in profile.rows[0].source
        steps = profile.of("step")
        assert {row.key.batch for row in steps if not row.key.beside} == {1, 2}
        assert {row.key.num_images for row in steps if row.key.beside} == {
            len(cell["sizes_px"]) for cell in result["parts"][family.name]["mixes"]["cells"]
        }
        assert {row.key.uses_guidance for row in profile.rows} == {not family.embeds_guidance}


def _left_out(result: dict[str, Any]) -> list[dict[str, str]]:
    sections = [found for part in result["parts"].values() for found in part.values()]
    return [one for found in sections for one in found.get("left_out", ())]


def test_a_part_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tiny", "--isolate", "--only", "kernels"]
    assert suite.main([*arguments, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.glob("*.json")
    part = json.loads(path.read_text())["parts"]["kernels"]
    assert {row["op"] for row in part["ops"]["rows"]} >= {"geglu", "group_norm_silu"}
    assert part["bandwidth"]["read_and_written_bytes_per_s"]["median"] > 1e6


def test_a_process_that_dies_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_GRACE_S", 0.5)
    assert suite._wait_for([sys.executable, "-c", "raise SystemExit(3)"], 30.0).endswith("3")
    started_s = time.monotonic()
    assert "stopped" in suite._wait_for([sys.executable, "-c", "import time; time.sleep(60)"], 0.0)
    assert time.monotonic() - started_s < 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where nothing is")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main([]) == 2
    said = capsys.readouterr().err
    assert "CUDA device" in said
    assert "--device cpu --tiny" in said
    assert suite.main(["--device", "cpu"]) == 2


@pytest.mark.parametrize("family", published(), ids=lambda one: one.name)
def test_a_published_model_has_its_weights(family: Family) -> None:
    assert family.num_weights() == NUM_WEIGHTS[family.name]


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
    spoilt: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
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
    record = Record(None, 1000.0)
    few = replace(settings, batches=(1,), mixes={}, compile_kind="none")
    parts.run_part("sd3", few, record, [])
    assert record.sections["exactness"]["status"] == "failed"
    [cell] = record.sections["steps"]["cells"]
    assert "speed_up" not in cell["contenders"][OURS]
    assert cell["contenders"][OURS]["seconds"]["median"] > 0
    with pytest.raises(ValueError, match="wrong predictions"):
        profile_of("sd3", record.sections, device="d", source="s")
    assert has_failed({"parts": {"sd3": record.sections}})
    assert "NaN" not in as_json(record.sections)


def test_a_broken_section_costs_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(parts, "check_graphs", broken)
    monkeypatch.setattr(parts, "measure_mixes", broken)
    record = Record(tmp_path / "part.json", 1000.0)
    parts.run_part("flux", replace(settings, batches=(1,), compile_kind="none"), record, [])
    result = {"parts": {"flux": json.loads((tmp_path / "part.json").read_text())}}
    status = {name: found["status"] for name, found in result["parts"]["flux"].items()}
    assert status == {
        "model": "ok",
        "exactness": "ok",
        "graphs": "failed",
        "steps": "ok",
        "mixes": "failed",
        "compiled": "partial",
    }
    assert any("an illegal memory access" in note for note in notes(result))
    assert has_failed(result)


def test_what_there_is_no_time_for_is_left_out_and_told(settings: Settings) -> None:
    record = Record(None, 0.0)
    parts.run_part("sd3", settings, record, [])
    assert not record.sections["steps"]["cells"]
    said = list(notes({"parts": {"sd3": record.sections}}))
    assert "left out sd3, steps: 64 px, batch 1 (no time left)" in said


def test_broken_ops_are_replaced_by_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_cluster.kernels.geglu import reference

    monkeypatch.setattr(packed_weights, "geglu", None)
    monkeypatch.setattr(unet_parts, "has_row_norm", lambda _norm: True)
    assert parts.replace_broken(["geglu", "group_norm_silu", "row_gather"]) == [
        *("geglu", "group_norm_silu")
    ]
    assert packed_weights.geglu is reference.geglu
    assert not unet_parts.has_row_norm(None)


def test_the_compiled_model_is_measured_and_is_itself_again(settings: Settings) -> None:
    contest = contest_of(settings, "sd3")
    record = Record(None, 1000.0)
    with record.section("compiled") as section:
        measure_compiled(settings, contest, section, is_exact=True)
    [cell] = record.sections["compiled"]["cells"]
    assert cell["contenders"][COMPILED]["seconds"]["median"] > 0
    assert not any(_is_compiled(one) for one in contest.denoiser.model.modules())


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None
