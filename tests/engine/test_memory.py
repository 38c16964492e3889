"""The memory that is planned is the memory that is used, and offloaded weights change no image."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from ray_cluster.engine.batch.batch_caps import BatchCaps
from ray_cluster.engine.files.folders import component_config
from ray_cluster.engine.files.memory import (
    decode_bytes,
    encode_bytes,
    model_need,
    plan_model_memory,
    step_bytes,
)
from ray_cluster.engine.files.weights import component_weights, vae_dtype
from ray_cluster.engine.models.loading import load_model
from ray_cluster.engine.models.offload import place_weights
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.engine.stages.autoencoder import ImageDecoder, decode_batch
from ray_cluster.engine.stages.prompt_encoder import PipelineEncoder
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.errors import MemoryRefused
from ray_cluster.policies.costs.gpu_shares import Card
from ray_cluster.policies.costs.memory import MemoryNeed, Offloaded, SizePx
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    PIXEL_TOLERANCE,
    call_model,
    difference,
    drive,
    engine_of,
    load,
    pixel_difference,
    pool,
    request,
    start,
)

Record = Callable[[str, object], None]
SHARE = 0.05
MIB = 2**20


def allocator_peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that the real CPU allocator gave out at a time for one run of the work.

    The profiler also reports what earlier work frees meanwhile, in sizes that it remembers of
    addresses long given to others: only what was given out in this run is counted.
    """
    work()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    del kept
    live: dict[int, int] = {}
    alive = peak = 0
    for each in _allocations(profiled.profiler.kineto_results.experimental_event_tree()):
        alive -= live.pop(each.ptr, 0)
        if each.alloc_size > 0:
            live[each.ptr] = each.alloc_size
            alive += each.alloc_size
        peak = max(peak, alive)
    return peak


def _allocations(events: Iterable[Any]) -> list[Any]:
    """What was given out and taken back, in the order of time; `events` is the profiler's tree."""
    found, left = [], list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            found.append(event)
    return [each.extra_fields for each in sorted(found, key=lambda one: one.start_time_ns)]


def real_step(executor: UNetExecutor, config: dict[str, Any], side: int, rows: int) -> None:
    width = config["cross_attention_dim"]
    pooled = ids = None
    if config.get("addition_embed_type") == "text_time":
        pooled, ids = torch.randn(32), torch.zeros(6)
    conditioning = Conditioning(torch.randn(77, width), pooled_embeds=pooled, time_ids=ids)
    latents = [torch.randn(4, side, side)] * rows
    call_model(executor, latents, torch.full((rows,), 500.0), [conditioning] * rows, [1.0] * rows)


@pytest.mark.parametrize("name", ["sd", "sdxl", "shapes"])
def test_the_planned_bytes_of_a_step_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    """From two model rows on: for one tiny row torch takes a convolution with a large workspace."""
    config = component_config(zoo.folder(name), "unet")
    executor = zoo.model(name).executor
    worst = 0.0
    for side, rows in ((16, 4), (32, 2), (32, 6)):
        real = allocator_peak(lambda s=side, n=rows: real_step(executor, config, s, n))
        planned = step_bytes(config, (side, side), rows)
        record(f"step {name} {side} x{rows}", planned / real - 1)
        worst = max(worst, abs(planned / real - 1))
    assert worst <= SHARE


# another step in half precision: test_wide_layers.py
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_step_in_half_precision_is_planned_as_what_it_takes_on_a_cpu(
    zoo: Zoo, name: str, record: Record
) -> None:
    """Norms and attention are in float32 there: half of what float32 takes would not do."""
    config = component_config(zoo.folder(name), "unet")
    executor = load_model(pool(zoo.folder(name), dtype="bfloat16")).executor
    for side, rows in ((32, 2), (32, 6)):
        real = allocator_peak(lambda s=side, n=rows: real_step(executor, config, s, n))
        planned, full = (
            step_bytes(config, (side, side), rows, dtype)
            for dtype in (torch.bfloat16, torch.float32)
        )
        record(f"bfloat16 step {name} {side} x{rows}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE
        assert full / 2 < (1 - SHARE) * real


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_planned_bytes_of_decoding_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    config = component_config(zoo.folder(name), "vae")
    vae = zoo.model(name).decoder._vae
    for side in (32, 64):
        latents = torch.randn(1, 4, side, side)
        with torch.inference_mode():
            real = allocator_peak(lambda z=latents: vae.decode(z, return_dict=False))
        planned = decode_bytes(config, (side, side))
        record(f"decode {name} {side}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_planned_bytes_of_encoding_are_those_of_the_allocator(
    zoo: Zoo, name: str, record: Record
) -> None:
    config = component_config(zoo.folder(name), "vae")
    vae = zoo.model(name).images._vae
    for side in (32, 64):
        image = torch.randn(1, 3, 4 * side, 4 * side)
        with torch.inference_mode():
            real = allocator_peak(lambda x=image: vae.encode(x, return_dict=False))
        planned = encode_bytes(config, (side, side))
        record(f"encode {name} {side}", planned / real - 1)
        assert abs(planned / real - 1) <= SHARE


def test_a_plan_has_room_to_encode_or_decode_beside_a_step(zoo: Zoo) -> None:
    folder = zoo.folder("sdxl")
    config = component_config(folder, "vae")
    need = model_need(folder, [(64, 64)], torch.float32, 1)
    coding = max(decode_bytes(config, (16, 16)), encode_bytes(config, (16, 16)))
    assert need.activation_by_size[64, 64].fixed_bytes >= coding


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_the_bytes_of_a_step_grow_linearly_with_the_rows(zoo: Zoo, name: str) -> None:
    config = component_config(zoo.folder(name), "unet")
    two, four, ten = (step_bytes(config, (16, 16), rows) for rows in (2, 4, 10))
    assert ten == pytest.approx(four + 3 * (four - two), rel=0.02)
    assert four > 1.5 * two
    # and with the pixels
    small, middle, large = (step_bytes(config, (side, side), 2) for side in (32, 64, 96))
    assert (large - middle) / (96**2 - 64**2) == pytest.approx(
        (middle - small) / (64**2 - 32**2), rel=0.05
    )


@pytest.mark.parametrize("name", ["sd", "sdxl", "shapes", "sd3", "flux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_of_the_weights_are_those_of_the_loaded_modules(
    zoo: Zoo, name: str, dtype: torch.dtype
) -> None:
    """T5 keeps some layers in float32 where others are in float16; CLIP and diffusers' none."""
    planned = component_weights(zoo.folder(name), dtype)
    planned.pop("vae")
    for part, module in load_models(zoo.folder(name), dtype).items():
        if part != "vae":
            weights = {one.data_ptr(): one.nbytes for one in module.state_dict().values()}
            layers = (
                sum(one.nbytes for key, one in each.state_dict().items() if "." not in key)
                for each in module.modules()
            )
            assert planned[part].num_bytes == sum(weights.values())
            assert planned[part].layer_bytes == max(layers)


@pytest.mark.parametrize("name", ["sdxl", "sd", "sd3"])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "float16"]
)
def test_an_autoencoder_is_planned_in_the_format_that_it_is_loaded_in(
    zoo: Zoo, name: str, dtype: Any
) -> None:
    folder = zoo.folder(name)
    vae = load(pool(folder, dtype=dtype)).decoder._vae
    asked = getattr(torch, dtype)
    overflows = dtype == "float16" and vae.config.get("force_upcast", False)
    assert vae.dtype == vae_dtype(component_config(folder, "vae"), asked)
    assert vae.dtype == (torch.float32 if overflows else asked)
    loaded = sum(one.nbytes for one in vae.parameters())
    assert component_weights(folder, asked)["vae"].num_bytes == loaded
    # what decoding takes, too
    need = model_need(folder, [(64, 64)], asked, 1, torch.device("cuda"))
    full = model_need(folder, [(64, 64)], torch.float32, 1, torch.device("cuda"))
    fixed = [one.activation_by_size[64, 64].fixed_bytes for one in (need, full)]
    assert (fixed[0] > 0.6 * fixed[1]) == (vae.dtype == torch.float32)


# --- the plan ---


LARGE, BOTH = [(128, 128)], [(64, 64), (128, 128)]


def need_of(zoo: Zoo, device: str = "cpu") -> MemoryNeed:
    return model_need(zoo.folder("sdxl"), LARGE, torch.float32, 8, torch.device(device))


def need_gib(zoo: Zoo, device: str = "cpu") -> Callable[[int], float]:
    """What a batch of so many large images needs."""
    need = need_of(zoo, device)
    beside = need.context_bytes + need.weights_bytes
    return lambda batch: (beside + need.activation_by_size[128, 128].at(batch)) / 2**30


def test_every_verdict_is_reached_by_some_budget(zoo: Zoo) -> None:
    def plan(gib: float, sizes: Sequence[SizePx] = LARGE, **changes: Any) -> Any:
        config = pool(zoo.folder("sdxl"), memory_gib=gib, max_batch=8, max_in_flight=8, **changes)
        return plan_model_memory(zoo.folder("sdxl"), config, sizes, torch.float32)

    on_gpu = {"device": "cuda", "num_gpus": 1}
    needed, needed_on_gpu = need_gib(zoo), need_gib(zoo, "cuda")
    assert plan(1.01 * needed(8)).verdict == "fits"
    capped = plan(1.01 * needed(3), BOTH)
    assert capped.verdict == "capped"
    assert capped.max_batch_by_size[128, 128] == 3
    assert capped.max_batch_by_size[64, 64] == 8
    assert plan(0.99 * needed(1)).verdict == "refused"
    spared = need_of(zoo, "cuda").encoder_bytes / 2**30
    tight = needed_on_gpu(1) - spared / 2
    assert plan(tight, **on_gpu).offloaded == "text encoders"
    assert plan(tight, offload="never", **on_gpu).verdict == "refused"
    assert plan(tight - spared, **on_gpu).offloaded == "all"


@pytest.mark.parametrize(
    ("memory_gib", "num_gpus", "free_gib", "given_mib"),
    [
        (None, 1, 24, 24 * 1024 * 0.85),
        (None, 0.5, 24, 12 * 1024 * 0.85),
        (None, 0.5, 2, 2 * 1024 * 0.85),
        (3, 0.5, 24, 3 * 1024),
        (3, 0.5, 2, 2 * 1024),
    ],
)
def test_a_replica_plans_with_its_part_of_the_card_and_no_more_than_is_free(
    zoo: Zoo, memory_gib: float | None, num_gpus: float, free_gib: int, given_mib: float
) -> None:
    folder, card = zoo.folder("sdxl"), Card(24 * 2**30, free_gib * 2**30, (8, 0))
    config = pool(folder, device="cuda", num_gpus=num_gpus, memory_gib=memory_gib)
    plan = plan_model_memory(folder, config, LARGE, torch.bfloat16, card)
    assert f"given {math.ceil(given_mib)} MiB" in plan.explanation


def test_a_model_without_room_is_refused_before_it_is_loaded(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", None)
    with pytest.raises(MemoryRefused) as refusal:
        load_model(pool(zoo.folder("sdxl"), memory_gib=0.001))
    message = str(refusal.value)
    # what was given, what is allowed, what to change
    assert "pool m: refused: given 2 MiB" in message
    assert "no room for even one image of 64x64, 128x128" in message
    assert "MiB (memory_gib)" in message
    assert "lower max_px" in message


def test_a_capped_model_runs_in_batches_of_that_size(zoo: Zoo) -> None:
    model = load_model(pool(zoo.folder("sdxl"), memory_gib=1.01 * need_gib(zoo)(2), max_px=128))
    assert model.memory.verdict == "capped"
    assert model.max_batch_by_size[128, 128] == 2
    assert model.max_batch_by_size[96, 128] == 2
    assert model.max_batch_by_size[64, 64] == 8


def test_caps_of_sizes_that_were_not_planned_are_those_of_the_next_larger() -> None:
    caps = BatchCaps({(64, 64): 8, (128, 128): 3})
    assert [caps[size] for size in ((32, 32), (64, 64), (64, 72), (128, 96))] == [8, 8, 3, 3]
    assert caps[256, 256] == 3


def test_half_the_width_needs_half_the_memory_of_a_gpu(zoo: Zoo) -> None:
    full, half = (
        model_need(zoo.folder("sd"), [(64, 64)], dtype, 4, torch.device("cuda"))
        for dtype in (torch.float32, torch.float16)
    )
    assert half.weights_bytes == full.weights_bytes / 2
    costs = [need.activation_by_size[64, 64].at(4) for need in (full, half)]
    assert costs[1] == pytest.approx(costs[0] / 2, rel=0.01)


# --- offloading ---


@pytest.mark.parametrize("offloaded", ["text encoders", "all"])
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_offloaded_weights_give_the_same_image(
    zoo: Zoo, name: str, offloaded: Offloaded, record: Record
) -> None:
    """The executor calls the UNet's parts, never its `forward`: the hooks must sit on the parts."""
    device = torch.device("cpu")
    extra = {} if name == "sdxl" else {"safety_checker": None}
    pipeline = DiffusionPipeline.from_pretrained(zoo.folder(name), **extra)
    place_weights(pipeline, device, offloaded)
    modules = {
        key: one for key, one in pipeline.components.items() if isinstance(one, torch.nn.Module)
    }

    def check_places() -> None:
        for key, one in modules.items():
            is_away = offloaded == "all" or key.startswith("text_encoder")
            assert {each.device.type for each in one.parameters()} == {"meta" if is_away else "cpu"}

    check_places()
    factor = pipeline.vae_scale_factor
    model = zoo.model(name)
    executor = UNetExecutor(pipeline.unet, vae_scale_factor=factor, device=device)
    encoder, decoder = PipelineEncoder(pipeline, device), ImageDecoder(pipeline.vae, device)
    one = request(num_steps=3, negative_prompt="blue")
    expected = drive(engine_of(model), {0: [start(model, one)]}).latents("a")
    with torch.inference_mode():
        (conditioning,) = encoder.encode([one])
        state = start(model, one)
        assert difference(conditioning.prompt_embeds, state.conditioning.prompt_embeds) == 0
        state.conditioning = conditioning
        found = drive(engine_of(model, executor=executor), {0: [state]}).latents("a")
        record("offloaded", difference(found, expected))
        assert difference(found, expected) <= CALL_TOLERANCE
        pixels, wanted = decoder.decode([found])[0], model.decoder.decode([expected])[0]
        assert pixel_difference(pixels, wanted) <= PIXEL_TOLERANCE
    # and the weights are away again
    check_places()


# --- the format of the autoencoder's weights ---


@pytest.mark.parametrize("name", ["sd", "sdxl", "shapes"])
def test_an_autoencoder_in_another_memory_format_makes_the_same_pixels(
    zoo: Zoo, name: str, record: Record
) -> None:
    vae, ours = zoo.reference(name).pipeline.vae, zoo.model(name).decoder._vae
    formats = [
        {
            part.weight.is_contiguous(memory_format=torch.channels_last)
            for part in one.modules()
            if isinstance(part, torch.nn.Conv2d) and part.kernel_size > (1, 1)
        }
        for one in (vae, ours)
    ]
    assert formats == [{False}, {True}]
    latents = torch.randn((9, 4, 16, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = (one.decode(latents, return_dict=False)[0] for one in (ours, vae))
    record(f"channels last {name}", difference(found, expected))
    assert difference(found, expected) <= CALL_TOLERANCE


def test_images_are_decoded_in_goes_that_stay_in_the_caches() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [decode_batch(32 * 32, count, cpu) for count in (1, 4, 16)] == [1, 4, 4]
    assert [decode_batch(32 * 32, count, gpu) for count in (1, 4, 16, 20)] == [1, 4, 16, 16]
    assert decode_batch(256 * 256, 3, cpu) == decode_batch(256 * 256, 3, gpu) == 1
