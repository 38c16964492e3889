"""Merged weights are the model's with the deltas in them, and leave it as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.deltas import RowDeltas
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.adapters.weight_parts import parts_of
from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.engine.models import packed_weights
from ray_cluster.engine.models.loading import LoadedModel, start_states
from ray_cluster.engine.models.packed_weights import (
    packed_conv,
    packed_geglu,
    packed_gelu,
    packed_linear,
)
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.errors import ModelUnsupported
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.engine.conftest import Zoo
from tests.engine.dits import dit_request
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    all_rows,
    difference,
    pixel_difference,
    request,
)
from tests.engine.lora_sets import random_set
from tests.engine.low_rank import Adapter

Record = Callable[[str, object], None]
MODELS = ("sd15", "sdxl", "shapes", "sd3", "sd35", "flux")
DITS = ("sd3", "sd35", "flux")


@pytest.fixture(params=["packed", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where oneDNN's layers are not the faster ones, nothing is packed."""
    if request.param == "plain":
        monkeypatch.setattr(packed_weights, "can_pack", lambda _weight: False)
    return str(request.param)


def factors_of(layer: Any, seed: int) -> LowRank:
    one = Adapter.random(nn.ModuleDict({"x": layer}), 3, seed).by_path["x"]
    if isinstance(layer, nn.Conv2d):
        padding, stride = layer.padding, layer.stride
        return LowRank(one.shrink, one.expand, stride, padding)  # type: ignore[arg-type]
    return LowRank(one.shrink, one.expand)


def made(weights: MergedWeights) -> MergedWeights:
    while not weights.is_made:
        weights.make_next()
    return weights


CALLS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[..., Any], tuple[int, ...]]] = {
    "linear": (lambda: [nn.Linear(24, 40)], packed_linear, (7, 24)),
    "no bias": (lambda: [nn.Linear(24, 40, bias=False)], packed_linear, (7, 24)),
    "joint": (lambda: [nn.Linear(24, n) for n in (40, 8, 16)], packed_linear, (7, 24)),
    "of a pixel": (lambda: [nn.Conv2d(24, 40, 1)], packed_linear, (7, 24)),
    "gelu": (lambda: [nn.Linear(24, 40)], lambda one: packed_gelu(one, "tanh"), (7, 24)),
    "geglu": (lambda: [nn.Linear(24, 80)], packed_geglu, (7, 24)),
    "conv": (lambda: [nn.Conv2d(6, 10, 3, padding=1)], packed_conv, (2, 6, 8, 12)),
    "strided": (lambda: [nn.Conv2d(6, 10, 3, padding=1, stride=2)], packed_conv, (2, 6, 8, 12)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_with_merged_weights_is_the_layer_with_deltas(
    way: str, name: str, record: Record
) -> None:
    torch.manual_seed(0)
    make, pack, shape = CALLS[name]
    layers, inputs = make(), torch.randn(shape)
    # the second one of several keeps its weights
    deltas = {layer: factors_of(layer, seed) for seed, layer in enumerate(layers) if seed != 1}
    call = pack(*layers)
    rows = RowDeltas.of([deltas] * len(inputs))
    with torch.inference_mode():
        plain, expected = call(inputs), call(inputs, rows)
        weights = made(MergedWeights(deltas))
        # until they are exchanged, nothing is different
        assert torch.equal(call(inputs), plain)
        weights.exchange()
        found = call(inputs)
        weights.exchange()
        assert torch.equal(call(inputs), plain)
        wrong = made(MergedWeights({layer: one.scaled(0.9) for layer, one in deltas.items()}))
        wrong.exchange()
        far = call(inputs)
    error = difference(found, expected)
    record(f"{name} {way}", error)
    assert error <= CALL_TOLERANCE
    assert difference(far, expected) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_a_window_of_a_convolution_has_merged_weights_too(way: str) -> None:
    torch.manual_seed(0)
    layer, windows = nn.Conv2d(6, 10, 3, padding=1), torch.randn(5, 6, 3, 3)
    delta = factors_of(layer, 0)
    call = packed_conv(layer)
    added = torch.einsum("dr,rchw,nchw->nd", delta.expand, delta.shrink, windows)
    with torch.inference_mode():
        expected = call.unpadded(windows) + added[:, :, None, None]
        made(MergedWeights({layer: delta})).exchange()
        assert difference(call.unpadded(windows), expected) <= CALL_TOLERANCE


def test_a_layer_that_is_called_as_it_is_gets_its_very_parameter_back() -> None:
    layer = nn.Linear(8, 4)
    own, values = layer.weight, layer.weight.detach().clone()
    delta = factors_of(layer, 0)
    weights = made(MergedWeights({layer: delta}))
    weights.exchange()
    expected = values + delta.expand @ delta.shrink
    assert difference(layer.weight.detach(), expected) <= CALL_TOLERANCE
    weights.exchange()
    assert layer.weight is own
    assert torch.equal(own.detach(), values)


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    delta = factors_of(layer, 0).to(torch.device("cpu"), torch.bfloat16)
    exact = layer.weight.detach().float() + delta.expand.float() @ delta.shrink.float()
    call = packed_linear(layer)
    weights = made(MergedWeights({layer: delta}))
    weights.exchange()
    [part] = parts_of(layer)
    assert torch.equal(part.weight.plain(), exact.to(torch.bfloat16))
    assert call is not None


def test_what_cannot_be_merged_is_refused() -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(ModelUnsupported, match="allowed: products of low rank"):
        MergedWeights({layer: lambda inputs: inputs})
    layer._hf_hook = nn.Identity()
    with pytest.raises(ModelUnsupported, match=r"loras\.merge: never"):
        MergedWeights({layer: factors_of(nn.Linear(8, 4), 0)})
    half = MergedWeights({one: factors_of(one, 0) for one in (nn.Linear(8, 4), nn.Linear(8, 4))})
    half.make_next()
    with pytest.raises(ValueError, match="1 of 2 merged weights are not made yet"):
        half.exchange()
    assert half.num_bytes == 2 * half.num_bytes_left == 2 * 8 * 4 * 4
    assert half.peak_bytes == half.num_bytes + 12 * 8 * 4


def requests_of(name: str) -> list[ImageRequest]:
    """Of several sizes, with guidance and without, all of one set."""
    make = dit_request if name in DITS else request
    changes: list[dict[str, Any]] = [
        {"width_px": 96, "guidance_scale": 1.0},
        {"num_steps": 4, "seed": 2},
        {"prompt": "blue", "seed": 3},
    ]
    if name not in DITS:
        changes[1]["sampler"] = "euler"
    used = AddOns(loras=(LoraUse("x", 1.0, "x"),))
    return [make(f"r{n}", add_ons=used, **one) for n, one in enumerate(changes)]


def states_of(model: LoadedModel, name: str, adapters: AdapterSet | None) -> list[Any]:
    requests = requests_of(name)
    prompts = [None if adapters is None else adapters.prompts] * len(requests)
    with torch.inference_mode():
        return start_states(model, requests, now_s=0.0, deltas=prompts)


def new_engine(model: LoadedModel) -> StepEngine:
    return StepEngine(model.executor, all_rows, model.tables, time.monotonic)


@torch.inference_mode()
def run(
    model: LoadedModel, name: str, adapters: AdapterSet | None, merged: AdapterSet | None = None
) -> list[Tensor]:
    """Final latents; from the second step on with the merged weights of a set, for two steps."""
    engine, states = new_engine(model), states_of(model, name, adapters)
    for state in states:
        engine.add(state, None if adapters is None else adapters.denoiser)
    weights = None
    if merged is not None:
        assert merged.denoiser is not None
        weights = made(model.executor.merged(merged.denoiser))
    number = 0
    while len(engine):
        if weights is not None and number == 1:
            for row in engine.rows.values():
                # the control merges what is not theirs
                row.deltas = weights.deltas
            engine.weights.merge(weights)
        if number == 3:
            engine.weights.unmerge()
        report = engine.step()
        assert not report.failed
        number += 1
    engine.weights.unmerge()
    assert number > 3
    return [state.latents for state in states]


def packed_of(model: LoadedModel) -> list[Tensor]:
    """All weights that executors have packed."""
    executor: Any = model.executor
    module = getattr(executor, "_unet", None) or executor._model
    layers = [one for one in module.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
    assert len(layers) > 40
    return [part.weight.plain() for layer in layers for part in parts_of(layer)]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_is_merged_on_its_way_is_the_unmerged_run(
    zoo: Zoo, name: str, record: Record
) -> None:
    model = zoo.model(name)
    own = random_set(model, zoo.reference(name).pipeline)
    other = random_set(model, zoo.reference(name).pipeline, scale=0.8)
    base, before = run(model, name, None), packed_of(model)
    expected = run(model, name, own)
    found = run(model, name, own, own)
    wrong = run(model, name, own, other)
    error = max(map(difference, found, expected))
    record(f"run {name}", error)
    assert error <= RUN_TOLERANCE
    assert min(map(difference, wrong, expected)) >= CONTROL_FACTOR * RUN_TOLERANCE
    assert min(map(difference, base, expected)) >= CONTROL_FACTOR * RUN_TOLERANCE
    # and the model is what it was, to the last bit
    after = packed_of(model)
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, run(model, name, None), base))


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_images_are_the_same(zoo: Zoo, name: str) -> None:
    model = zoo.model(name)
    own = random_set(model, zoo.reference(name).pipeline)
    base = run(model, name, None)
    with torch.inference_mode():
        expected, found, plain = (
            [model.decoder.decode([one])[0] for one in latents]
            for latents in (run(model, name, own), run(model, name, own, own), base)
        )
        assert all(map(torch.equal, run(model, name, None), base))
    for one, other, bare in zip(expected, found, plain, strict=True):
        assert pixel_difference(one, other) <= PIXEL_TOLERANCE
        assert pixel_difference(one, bare) > 3 * PIXEL_TOLERANCE


def two_sets(zoo: Zoo) -> tuple[LoadedModel, Sequence[AdapterSet]]:
    model, pipeline = zoo.model("sd15"), zoo.reference("sd15").pipeline
    return model, [random_set(model, pipeline, seed=seed) for seed in (0, 1)]


def test_rows_of_other_sets_are_never_stepped_with_merged_weights(zoo: Zoo) -> None:
    model, (own, other) = two_sets(zoo)
    assert own.denoiser is not None
    first, second, third = states_of(model, "sd15", own)
    alone = run(model, "sd15", own)
    with torch.inference_mode():
        engine = new_engine(model)
        weights = made(model.executor.merged(own.denoiser))
        engine.add(first, own.denoiser)
        for deltas in (None, other.denoiser):
            engine.add(second, deltas)
            with pytest.raises(ValueError, match="1 of 2 rows, such as 'r1', have other LoRAs"):
                engine.weights.merge(weights)
            assert engine.weights.merged is None
            engine.abort("r1")
        engine.weights.merge(weights)
        engine.add(second, own.denoiser)
        assert engine.weights.merged is weights
        engine.step()
        # whose row puts the model's own weights back before it is stepped
        engine.add(third, other.denoiser)
        assert engine.weights.merged is None
        assert not weights.is_in
        while len(engine):
            assert not engine.step().failed
    assert difference(first.latents, alone[0]) <= RUN_TOLERANCE
    assert difference(second.latents, alone[1]) <= RUN_TOLERANCE
    assert difference(third.latents, run(model, "sd15", other)[2]) <= CONTROL_FACTOR * RUN_TOLERANCE


def test_graphs_go_with_the_weights_that_they_know(zoo: Zoo) -> None:
    model, (own, _) = two_sets(zoo)
    assert own.denoiser is not None

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        output = compute()
        return output, lambda: None

    graphed = GraphedExecutor(model.executor, capture=capture)
    weights = made(graphed.merged(own.denoiser))
    engine = StepEngine(graphed, all_rows, model.tables, time.monotonic)
    with torch.inference_mode():
        engine.add(states_of(model, "sd15", None)[0])
        engine.step()
        assert graphed.num_graphs == 1
        weights.exchange()
        assert graphed.num_graphs == 0
        weights.exchange()


def test_nothing_is_merged_that_runs_once_an_image(zoo: Zoo) -> None:
    """Keys and values of prompts: with deltas they cost little, and merged they would take room."""
    model, (own, _) = two_sets(zoo)
    assert own.denoiser is not None
    weights = model.executor.merged(own.denoiser)
    lean: Any = model.executor._lean  # type: ignore[attr-defined]
    prompts = lean.prompts._product
    assert all(one.weight is not prompts for one in weights._changed)
    assert any(part.weight is prompts for one in own.denoiser for part in parts_of(one))
    assert bind_adapters(model, []).denoiser is None
