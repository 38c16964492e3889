"""Batches that run out of memory."""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny

from ray_cluster.engine.batch.batch_caps import BatchCaps
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.stages.autoencoder import ImageDecoder, ImageEncoder
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.models.local import vae_scale_factor
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.edits import template
from tests.engine.failing import FailsWith
from tests.engine.harness import (
    RUN_TOLERANCE,
    difference,
    drive,
    engine_of,
    pixel_difference,
    request,
    run_alone,
    start_all,
)

Record = Callable[[str, object], None]

# --- memory that runs out ---


class RoomFor(FailsWith):
    """Runs out of memory with more than so many rows, or with a certain row."""

    def __init__(self, inner: Any, room: int, marked: Any = None) -> None:
        super().__init__(inner, torch.OutOfMemoryError("CUDA out of memory"), marked, [])
        self.room = room

    def encode_half(self, batch: Any) -> Any:
        if len(batch.prepared) > self.room:
            self.sizes.append(len(batch.prepared))
            raise self._error
        return super().encode_half(batch)


def engine_with_caps(zoo: Zoo, executor: Any, caps: BatchCaps) -> Any:
    model = replace(zoo.model("sd"), executor=executor, max_batch_by_size=caps)
    return build_engine(model, max_batch=8, clock=lambda: 0.0)


def test_a_batch_that_runs_out_of_memory_is_not_tried_again_at_that_size(
    zoo: Zoo, caplog: pytest.LogCaptureFixture, record: Record
) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i) for i in range(8)]
    executor, caps = RoomFor(model.executor, 3), BatchCaps({(64, 64): 8, (128, 128): 4})
    with caplog.at_level(logging.WARNING):
        run = drive(engine_with_caps(zoo, executor, caps), {0: start_all(model, requests)})
    assert not run.failed
    # the first step finds out; nothing larger than what ran then is tried again
    assert executor.sizes[:7] == [8, 4, 2, 2, 4, 2, 2]
    assert set(executor.sizes[7:]) == {2}
    assert caps == {(64, 64): 2, (128, 128): 2}
    assert "batches of 64x64 are capped at 2" in caplog.text
    errors = [difference(run.latents(one.request_id), run_alone(model, one)) for one in requests]
    record("after running out of memory", max(errors))
    assert max(errors) <= RUN_TOLERANCE


def test_one_request_that_needs_too_much_fails_alone_and_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = RoomFor(model.executor, 8, states[2].conditioning)
    run = drive(engine_with_caps(zoo, executor, caps), {0: states})
    assert run.failed.keys() == {"r2"}
    assert run.finished.keys() == {"r0", "r1", "r3"}
    assert caps == {(64, 64): 8}
    assert executor.sizes[5:] == [3] * 5


def test_any_other_error_of_a_batch_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = FailsWith(model.executor, RuntimeError("once"), states[0].conditioning, [1])
    assert not drive(engine_with_caps(zoo, executor, caps), {0: states}).failed
    assert caps == {(64, 64): 8}


def test_a_lowered_cap_holds_for_larger_sizes_and_not_for_planned_smaller_ones() -> None:
    caps = BatchCaps({(64, 64): 8, (96, 96): 6, (128, 128): 4})
    caps.lower([(80, 80)] * 5)
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 5, 4]
    caps.lower([(96, 96)])
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 1, 1]
    caps.lower([(96, 96)] * 7)
    assert caps[96, 96] == 1


def test_a_lowered_cap_rises_by_one_after_so_many_full_batches() -> None:
    caps = BatchCaps({(64, 64): 5, (128, 128): 4}, quiet_batches=3)
    caps.lower([(64, 64)] * 2)
    for batch in (2, 1, 2, 1):
        caps.confirm([(64, 64)] * batch)
    assert caps[64, 64] == 2, "batches that are not full prove nothing"
    caps.confirm([(64, 64)] * 2)
    assert caps == {(64, 64): 3, (128, 128): 2}
    for _ in range(2):
        caps.confirm([(64, 64)] * 3)
    caps.lower([(64, 64)] * 3)
    for _ in range(2):
        caps.confirm([(64, 64)] * 3)
    assert caps[64, 64] == 3, "the time without an error starts again"
    for _ in range(20):
        caps.confirm([(64, 64)] * caps[64, 64])
    assert caps == {(64, 64): 5, (128, 128): 2}, "never above the plan"


def test_a_size_that_was_not_planned_raises_no_larger_ones_cap() -> None:
    caps = BatchCaps({(64, 64): 8, (128, 128): 4}, quiet_batches=2)
    caps.lower([(128, 128)])
    assert caps[80, 80] == 1
    for _ in range(20):
        caps.confirm([(80, 80)] * caps[80, 80])
    assert (caps[80, 80], caps[128, 128]) == (4, 1)


def test_the_engine_tries_larger_batches_again_once_there_is_room(zoo: Zoo) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", seed=i, num_steps=16) for i in range(4)]
    executor, caps = RoomFor(model.executor, 2), BatchCaps({(64, 64): 4}, quiet_batches=4)
    engine = engine_with_caps(zoo, executor, caps)
    for state in start_all(model, requests):
        engine.add(state)
    with torch.inference_mode():
        for _ in range(5):
            engine.step()
        assert executor.sizes == [4, 2, 2, *[2] * 4]
        assert caps == {(64, 64): 3}
        # one try that fails; its halves do not count as full batches
        engine.step()
        assert executor.sizes[7:] == [3, 2, 1]
        assert caps == {(64, 64): 2}
        executor.room = 4
        for _ in range(9):
            engine.step()
    assert executor.sizes[10:] == [*[2] * 4, *[3] * 4, 4]
    assert caps == {(64, 64): 4}


def test_a_step_whose_memory_ran_out_says_nothing_of_what_steps_take(zoo: Zoo) -> None:
    model = zoo.model("sd")
    executor, caps, ticks = RoomFor(model.executor, 2), BatchCaps({(64, 64): 4}), [0.0]
    model = replace(model, executor=executor, max_batch_by_size=caps)

    def clock() -> float:
        """A second passes with every look at it."""
        ticks[0] += 1
        return ticks[0]

    costs = StepCosts()
    engine = build_engine(model, max_batch=4, clock=clock, costs=costs)
    for state in start_all(model, [request(f"r{i}", seed=i) for i in range(4)]):
        engine.add(state)
    before = costs.current
    with torch.inference_mode():
        engine.step()
        assert executor.sizes == [4, 2, 2]
        assert costs.current == before
        engine.step()
    assert costs.current != before


def test_memory_of_a_failed_call_is_free_before_the_next_try(zoo: Zoo) -> None:
    """An exception's traceback keeps the call's tensors: the retry must come after it is gone."""
    inner = zoo.model("sd").executor
    alive: list[weakref.ref[Any]] = []
    seen: list[int] = []

    class Hungry(FailsWith):
        def encode_half(self, batch: Any) -> Any:
            seen.append(sum(one() is not None for one in alive))
            activations = torch.zeros(1000)
            alive.append(weakref.ref(activations))
            if len(batch.prepared) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner.encode_half(batch)

    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", num_steps=1) for i in range(4)])
    engine = engine_of(model, executor=Hungry(inner, ValueError(), None, []))
    assert not drive(engine, {0: states}).failed
    assert seen == [0] * 7


# --- decoding ---


class TightDecoder:
    """Stands before an autoencoder's decoder: no memory for more latent pixels than so many."""

    def __init__(self, vae: Any, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self._forward, self.room, self.calls = vae.decoder.forward, room, []
        self.alive: list[weakref.ref[Any]] = []
        monkeypatch.setattr(vae.decoder, "forward", self)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _empty(self) -> None:
        assert all(one() is None for one in self.alive), "the failed call still holds its memory"
        self.calls.append("empty cache")

    def __call__(self, latents: Any, *rest: Any) -> Any:
        count = latents.shape[0] * latents.shape[-1] * latents.shape[-2]
        self.calls.append(count)
        if count > self.room:
            activations = torch.zeros(10)
            self.alive.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._forward(latents, *rest)


@pytest.fixture
def decoder(zoo: Zoo) -> ImageDecoder:
    """One of its own, with an ``AutoencoderKL``."""
    return ImageDecoder(copy.deepcopy(zoo.model("sdxl").decoder._vae), torch.device("cpu"))


def latents_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, 4, 32, 32, generator=generator))


@pytest.mark.parametrize(("room", "num_frees"), [(32 * 32 * 3, 0), (32 * 32, 1)])
def test_images_that_do_not_fit_together_are_decoded_one_by_one(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch, room: int, num_frees: int
) -> None:
    latents = latents_of(3)
    with torch.inference_mode():
        expected = decoder.decode(latents)
        tight = TightDecoder(decoder._vae, monkeypatch, room)
        found = decoder.decode(latents)
    together = 32 * 32 * 3
    # once more with the cache empty
    wanted = [together, "empty cache", together, "empty cache", *[32 * 32] * 3]
    assert tight.calls == (wanted if num_frees else [together])
    assert max(pixel_difference(*pair) for pair in zip(found, expected, strict=True)) <= 1


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny"])
def test_an_image_too_large_for_the_memory_is_decoded_in_tiles_as_diffusers_does(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    vae = copy.deepcopy(zoo.model("sdxl").decoder._vae)
    if kind == "AutoencoderTiny":
        torch.manual_seed(0)
        wide, blocks = (8, 8, 8, 8), (1, 1, 1, 1)
        vae = AutoencoderTiny(
            encoder_block_out_channels=wide,
            decoder_block_out_channels=wide,
            num_encoder_blocks=blocks,
            num_decoder_blocks=blocks,
        )
    decoder, (latents,) = ImageDecoder(vae, torch.device("cpu")), latents_of(1)
    reference = copy.deepcopy(vae)
    reference.enable_tiling()
    reference.tile_latent_min_size = 16
    reference.tile_sample_min_size = 16 * vae_scale_factor(vae.config)
    with torch.inference_mode():
        whole = decoder.decode([latents])[0]
        in_tiles = ImageDecoder(reference, torch.device("cpu")).decode([latents])[0]
        assert pixel_difference(in_tiles, whole) > 1, "tiles are seen: the test can tell"
        tight = TightDecoder(vae, monkeypatch, 16 * 16)
        found = decoder.decode([latents])[0]
        assert pixel_difference(found, in_tiles) <= 1
        tight.room = 32 * 32
        # the next image is whole again
        assert pixel_difference(decoder.decode([latents])[0], whole) == 0
        tight.room = 8 * 8
        with pytest.raises(torch.OutOfMemoryError):
            decoder.decode([latents])
        tight.room = 32 * 32
        assert pixel_difference(decoder.decode([latents])[0], whole) == 0


def test_an_autoencoder_that_cannot_tile_fails_for_want_of_memory(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diffusers' own tiles of an ``AutoencoderTiny`` with a factor of 4 do not fit together."""
    vae = copy.deepcopy(zoo.model("sd").decoder._vae)
    tight = TightDecoder(vae, monkeypatch, 0)
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        ImageDecoder(vae, torch.device("cpu")).decode(latents_of(1))
    assert tight.calls == [32 * 32, "empty cache", 32 * 32]


class TightEncoder:
    """Lets an autoencoder encode only so many pixels at once."""

    def __init__(self, vae: Any, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.calls: list[int] = []
        self._room, self._forward = room, vae.encoder.forward
        monkeypatch.setattr(vae.encoder, "forward", self)

    def __call__(self, images: torch.Tensor) -> Any:
        pixels = images.shape[0] * images.shape[-2] * images.shape[-1]
        self.calls.append(pixels)
        if pixels > self._room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._forward(images)


@pytest.mark.parametrize("room", [3 * 64 * 64, 64 * 64, 32 * 32])
def test_images_that_do_not_fit_are_encoded_one_by_one_then_in_tiles(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    vae = copy.deepcopy(zoo.model("sdxl").images._vae)
    encoder = ImageEncoder(vae, torch.device("cpu"))
    images = [template((64, 64), seed) for seed in range(3)]
    reference = copy.deepcopy(vae)
    reference.enable_tiling()
    reference.tile_latent_min_size, reference.tile_sample_min_size = 8, 32
    in_tiles = ImageEncoder(reference, torch.device("cpu"))
    with torch.inference_mode():
        whole = encoder.encode(images)
        tiled = [in_tiles.encode([one])[0] for one in images]
        assert difference(torch.stack(tiled), torch.stack(whole)) > 1e-3, "tiles are seen"
        tight = TightEncoder(vae, monkeypatch, room)
        found = encoder.encode(images)
    assert tight.calls[0] == 3 * 64 * 64
    expected = tiled if room == 32 * 32 else whole
    assert difference(torch.stack(found), torch.stack(expected)) <= 1e-5


def test_any_other_error_of_decoding_is_not_tried_again(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = TightDecoder(decoder._vae, monkeypatch, 32 * 32)
    tight._forward = lambda *_: (_ for _ in ()).throw(RuntimeError("shapes"))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes"):
        decoder.decode(latents_of(1))
    assert tight.calls == [32 * 32]


def test_encoding_and_decoding_take_turns(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has memory for one of them."""
    model, at_work, most = zoo.model("sdxl"), [0], [0]

    def watched(inner: Any) -> Any:
        def work(items: Any) -> Any:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
            time.sleep(0.01)
            try:
                return inner(items)
            finally:
                at_work[0] -= 1

        return work

    monkeypatch.setattr(model.images, "_encode", watched(model.images._encode))
    monkeypatch.setattr(model.decoder, "_decode", watched(model.decoder._decode))
    image, latents = template((64, 64)), latents_of(1)

    def code(encodes: bool) -> None:
        with torch.inference_mode():
            if encodes:
                model.images.encode([image])
            else:
                model.decoder.decode(latents)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(code, [True, False] * 6))
    assert most == [1]
