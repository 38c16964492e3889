"""LoRAs read from files are those of diffusers, alone, several together, and in company."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ray_cluster.engine.adapters.lora_files import LoraFactors, read_lora
from ray_cluster.engine.adapters.low_rank import LowRank, joined
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.builtin import weights_folder
from ray_cluster.requests import ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    all_rows,
    difference,
    drive,
    request,
    start_all,
)

# peft, of the reference that has several
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
STYLES = ("pastel", "outline", "texture")


def file_of(name: str) -> Path:
    return weights_folder() / name / "pytorch_lora_weights.safetensors"


def deltas_of(model: Any, factors: Sequence[tuple[LoraFactors, float]]) -> Any:
    """What several LoRAs with these weights add together to the denoiser's layers."""
    by_path: dict[str, list[LowRank]] = {}
    for one, scale in factors:
        for path, pair in one.by_component["unet"].items():
            by_path.setdefault(path, []).append(pair.scaled(scale))
    return model.executor.bind({path: joined(some) for path, some in by_path.items()})


def test_each_style_alone_and_together_is_what_diffusers_makes(zoo: Zoo) -> None:
    model, reference = zoo.model("shapes"), zoo.reference("shapes")
    base = zoo.folder("shapes")
    loras = {name: read_lora(file_of(name), base) for name in STYLES}
    pipeline = reference.pipeline
    cases = [{name: 1.0} for name in STYLES] + [
        {"pastel": 0.7, "outline": 0.5},
        {"pastel": 0.4, "outline": 0.3, "texture": -0.2},
        {},
    ]
    requests = [
        request(
            f"r{index}",
            sampler=("ddim", "euler", "dpmpp_2m")[index % 3],
            seed=index,
            width_px=(64, 96)[index % 2],
        )
        for index in range(len(cases))
    ]
    engine = StepEngine(model.executor, all_rows, model.tables, time.monotonic)
    states = start_all(model, requests)
    with torch.inference_mode():
        for state, case in zip(states, cases, strict=True):
            chosen = [(loras[name], scale) for name, scale in case.items()]
            deltas = deltas_of(model, chosen) if chosen else None
            engine.add(state, deltas)
        while len(engine):
            report = engine.step()
            assert not report.failed
    try:
        for name in STYLES:
            pipeline.load_lora_weights(file_of(name), adapter_name=name)
        for one, case, state in zip(requests, cases, states, strict=True):
            if case:
                pipeline.enable_lora()
                pipeline.set_adapters(list(case), list(case.values()))
            else:
                pipeline.disable_lora()
            expected = reference._latents([one])[0]
            error = difference(state.latents, expected)
            assert error <= 4 * RUN_TOLERANCE, (case, error)
    finally:
        pipeline.unload_lora_weights()
    plain = drive_plain(zoo, requests[0])
    assert difference(states[0].latents, plain) > CONTROL_FACTOR * RUN_TOLERANCE


def drive_plain(zoo: Zoo, one: ImageRequest) -> torch.Tensor:
    model = zoo.model("shapes")
    engine = StepEngine(model.executor, all_rows, model.tables, time.monotonic)
    return drive(engine, {0: start_all(model, [one])}).latents(one.request_id)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("unet.conv_out.dora_scale", "DoRA"),
        ("lora_unet_x.hada_w1_a", "LoHa"),
        ("lora_unet_x.lokr_w1", "LoKr"),
        ("lora_unet_x.lora_mid.weight", "Tucker"),
    ],
)
def test_other_adapters_are_refused_by_name(zoo: Zoo, tmp_path: Path, key: str, said: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({key: torch.zeros(2, 2)}, path)
    with pytest.raises(ModelUnsupported, match=said):
        read_lora(path, zoo.folder("shapes"))
