"""What is written down of built-in models is what counting finds, and enough for their plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.files import memory
from ray_cluster.engine.files.known_activations import KnownActivations, written_down
from ray_cluster.engine.files.memory import model_need
from ray_cluster.engine.models.loading import inspect_model, plan_model
from ray_cluster.models.builtin import BUILTIN_MODELS, builtin_folder


def folder_of(model: str) -> Path:
    found = builtin_folder(model)
    assert found is not None
    return found


def counted(model: str) -> dict[str, int]:
    """Count on a CPU and on a GPU; on one with AVX-512, as on a GPU, no weights are copied."""
    known, profile = KnownActivations(), inspect_model(PoolConfig(name="m", model=model)).profile
    sizes = [(profile.default_width_px, profile.default_height_px), (profile.max_px,) * 2]
    for device in ("cpu", "cuda"):
        model_need(folder_of(model), sizes, torch.float32, 1, torch.device(device), known)
    return known.by_key


@pytest.mark.slow
@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_what_is_written_down_is_what_is_counted(model: str) -> None:
    """Else write it anew: with ``ATEN_CPU_CAPABILITY=avx2``, run this file as a program."""
    found = counted(model)
    written = KnownActivations.of(folder_of(model)).by_key
    assert found == {key: written.get(key) for key in found}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_the_plan_of_a_built_in_model_counts_nothing(
    model: str, *, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*_args: Any) -> int:
        raise AssertionError("it is written down")

    monkeypatch.setattr(memory, "packs", lambda _dtype: is_packed)
    for name in ("step_bytes", "decode_bytes", "encode_bytes"):
        monkeypatch.setattr(memory, name, count)
    pool = PoolConfig(name="m", model=model)
    assert plan_model(pool, inspect_model(pool)).verdict == "fits"


def test_another_configuration_or_format_is_counted() -> None:
    known, one = KnownActivations(), {"channels": 4}
    full, half = torch.float32, torch.bfloat16
    assert known.found("step", one, (8, 8), full, lambda: 5) == 5
    assert known.found("step", one, (8, 8), full, lambda: 6) == 5
    assert known.found("step", {"channels": 8}, (8, 8), full, lambda: 7) == 7
    assert known.found("step", one, (8, 16), full, lambda: 8) == 8
    assert known.found("step", one, (8, 8), half, lambda: 9) == 9


def test_only_of_built_in_models_numbers_are_believed(tmp_path: Path) -> None:
    assert KnownActivations.of(folder_of("shapes-sd")).by_key
    assert KnownActivations.of(tmp_path / "shapes-sd").by_key == {}


if __name__ == "__main__":
    for name in BUILTIN_MODELS:
        text = json.dumps(counted(name), indent=1, sort_keys=True)
        written_down(name).write_text(f"{text}\n")
