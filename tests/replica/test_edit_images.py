"""Edits on a replica: their images are fetched, decoded once, and pasted back."""

from __future__ import annotations

import asyncio
import hashlib
import io
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_cluster.api.output.error_answers import from_failure
from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.replica import retries
from ray_cluster.replica.denoise.sent_images import EditImages
from ray_cluster.replica.unexpected import failure_of
from ray_cluster.requests import BlobRef, Failure, ImageRequest, OutputSpec
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputStore
from tests.engine.edits import aligned_mask, edit_request, template
from tests.engine.staged import StagedModel
from tests.replica.setup import MemoryBlobs, offer, outcomes, serving, until

OWNER = "alice"


class Inputs:
    """Images in memory; fails, or lacks one, when told.

    Attributes:
        num_failures: of the next calls.
    """

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.num_failures = 0
        self.asked: list[str] = []

    def put(self, data: bytes) -> BlobRef:
        digest = hashlib.sha256(data).hexdigest()
        self.data[digest] = data
        return BlobRef(digest, len(data))

    def get(self, owner: str, ref: BlobRef) -> bytes | None:
        assert owner == OWNER
        self.asked.append(ref.sha256)
        if self.num_failures:
            self.num_failures -= 1
            raise BlobStoreError("/secret/place does not answer")
        return self.data.get(ref.sha256)


class Reader:
    """Counts what it decodes, into arrays of the work's size."""

    def __init__(self) -> None:
        self.num_read = 0

    def edit_pixels(
        self,
        _image: bytes,
        _mask: bytes | None,
        _edit: Any,
        work_px: tuple[int, int],
        _client: str = "",
    ) -> Future[EditPixels]:
        self.num_read += 1
        done: Future[EditPixels] = Future()
        blank = np.zeros((work_px[1], work_px[0], 3), np.uint8)
        done.set_result(EditPixels(blank, None, blank, None))
        return done


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "JOB_RETRY_S"):
        monkeypatch.setattr(retries, name, tuple(0.001 for _ in getattr(retries, name)))


def png(pixels: Any, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG")
    return buffer.getvalue()


def mask_png(mask: Any) -> bytes:
    """A mask as clients send it: transparent where it is to be edited."""
    rgba = np.zeros((*mask.shape, 4), np.uint8)
    rgba[..., 3] = np.where(mask, 0, 255)
    return png(rgba, "RGBA")


def edit_of(inputs: Inputs, request_id: str = "e", **changes: Any) -> ImageRequest:
    one = edit_request(request_id, **changes)
    assert one.edit is not None
    image = inputs.put(png(template(one.size_px)))
    mask = inputs.put(mask_png(aligned_mask(one.size_px, 8)))
    return replace(one, owner=OWNER, edit=replace(one.edit, image=image, mask=mask))


# --- fetching ---


async def test_images_that_a_call_shares_are_decoded_once() -> None:
    inputs, reader = Inputs(), Reader()
    images = EditImages(inputs, reader)
    several = [
        edit_of(inputs, f"e{seed}", seed=seed, strength=0.5 + seed / 9) for seed in (1, 2, 3)
    ]
    first, *others = await asyncio.gather(*map(images.pixels, several))
    assert all(one is first for one in others)
    assert await images.pixels(several[0]) is first
    assert reader.num_read == 1
    assert len(inputs.asked) == 2


async def test_another_size_or_owner_is_decoded_apart() -> None:
    inputs, reader = Inputs(), Reader()
    images = EditImages(inputs, reader)
    one = edit_of(inputs)
    await images.pixels(one)
    await images.pixels(replace(one, width_px=128))
    with pytest.raises(RequestFailed, match="AssertionError"):
        await images.pixels(replace(one, owner="bob"))
    assert reader.num_read == 2


async def test_only_so_many_bytes_are_kept_and_the_oldest_goes_first() -> None:
    inputs, reader = Inputs(), Reader()
    one_image = 2 * 64 * 64 * 3
    images = EditImages(inputs, reader, most_bytes=2 * one_image)
    several = [edit_of(inputs, f"e{index}") for index in range(3)]
    several = [replace(one, edit=replace(one.edit, feather_px=i)) for i, one in enumerate(several)]
    for one in (several[0], several[1], several[0], several[2]):
        await images.pixels(one)
    assert images.num_bytes == 2 * one_image
    assert reader.num_read == 3
    await images.pixels(several[0])
    assert reader.num_read == 3
    await images.pixels(several[1])
    assert reader.num_read == 4


async def test_a_waiter_that_leaves_does_not_take_the_images_from_the_others() -> None:
    inputs = Inputs()
    images = EditImages(inputs, Reader())
    one = edit_of(inputs)
    first, second = (asyncio.create_task(images.pixels(one)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).work.shape == (64, 64, 3)
    assert len(inputs.asked) == 2


async def test_a_store_that_fails_for_a_while_is_asked_again() -> None:
    inputs = Inputs()
    one = edit_of(inputs)
    inputs.num_failures = len(retries.RETRY_S)
    assert (await EditImages(inputs, Reader()).pixels(one)).mask is None


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_image_that_cannot_be_had_fails_its_request_alone(is_lost: bool) -> None:
    inputs = Inputs()
    images, one = EditImages(inputs, Reader()), edit_of(inputs)
    if is_lost:
        inputs.data.clear()
    else:
        inputs.num_failures = 1 + len(retries.RETRY_S)
    with pytest.raises(RequestFailed, match="not there any more" if is_lost else "not answer") as e:
        await images.pixels(one)
    assert e.value.stage == "input"
    assert "secret" not in str(e.value)
    # no fault of the model, and another try may succeed
    error = from_failure(failure_of(one.request_id, e.value))
    assert (error.status, error.code, error.retry) == (503, "input_store_unavailable", "self")
    again = edit_of(inputs)
    assert await images.pixels(again)


# --- a replica ---


def outside(one: ImageRequest) -> Any:
    return ~aligned_mask(one.size_px, 8)


async def test_a_replica_makes_edits_beside_images_from_text(
    model: StagedModel, coder: ImageCoder
) -> None:
    inputs = Inputs()
    edits = [
        edit_of(
            inputs, f"e{i}", seed=i, strength=(1.0, 0.6)[i % 2], output=OutputSpec(num_previews=i)
        )
        for i in range(3)
    ]
    async with serving(model, coder, "one", edits=EditImages(inputs, coder)) as (link, _):
        await offer(link.service, edits)
        done = await outcomes(link.service, edits)
    for one in edits:
        outcome = done[one.request_id]
        assert isinstance(outcome, Completed), outcome
        made = np.asarray(Image.open(io.BytesIO(outcome.result.data)))
        spared = outside(one)
        assert np.array_equal(made[spared], template(one.size_px)[spared])
        assert not np.array_equal(made[~spared], template(one.size_px)[~spared])


async def test_an_edit_whose_image_is_lost_fails_and_the_others_are_made(
    model: StagedModel, coder: ImageCoder
) -> None:
    inputs = Inputs()
    good = edit_of(inputs, "good")
    assert good.edit is not None
    bad = replace(good, request_id="bad", edit=replace(good.edit, image=BlobRef("0" * 64, 1)))
    async with serving(model, coder, "one", edits=EditImages(inputs, coder)) as (link, workers):
        await offer(link.service, [bad, good])
        done = await outcomes(link.service, [bad, good])
        workers[0].check_alive()
    assert isinstance(done["good"], Completed)
    failure = done["bad"]
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == ("input", "error")


async def test_an_edit_goes_on_from_the_state_that_a_dead_replica_left(
    model: StagedModel, coder: ImageCoder, tmp_path: Path
) -> None:
    """Without a second look at its image before the last step: the state has what it needs."""
    inputs, blobs = Inputs(), MemoryBlobs()
    one = edit_of(inputs, "e", num_steps=8)
    gate = model.gate("denoise", "e", call=5)
    edits = EditImages(inputs, coder)
    async with serving(model, coder, "one", blobs=blobs, every=1, edits=edits) as (link, [first]):
        await offer(link.service, [one])
        await asyncio.to_thread(gate.await_reached)
        await until(lambda: blobs.puts, "a state")
        draining = asyncio.create_task(first.drain())
        gate.open()
        await draining
        asked = len(inputs.asked)
        async with serving(
            model, coder, "two", link=link, blobs=blobs, edits=EditImages(inputs, coder)
        ):
            done = await outcomes(link.service, [one])
    outcome = done["e"]
    assert isinstance(outcome, Completed), outcome
    assert len(inputs.asked) == asked + 2
    made = np.asarray(Image.open(io.BytesIO(outcome.result.data)))
    assert np.array_equal(made[outside(one)], template(one.size_px)[outside(one)])


async def test_the_input_store_is_what_edits_read(tmp_path: Path) -> None:
    store = InputStore.open(str(tmp_path), grace_s=600.0)
    data = png(template((64, 64)))

    async def chunks() -> Any:
        yield data

    ref = await store.put(OWNER, chunks(), max_bytes=1 << 20)
    one = edit_request("e", masked=False, strength=0.5)
    assert one.edit is not None
    one = replace(one, owner=OWNER, edit=replace(one.edit, image=ref))
    with ImageCoder() as coder:
        pixels = await EditImages(store, coder).pixels(one)
    assert np.array_equal(pixels.work, template((64, 64)))
    assert pixels.weights is None


async def test_an_image_that_only_the_replica_finds_wrong_fails_its_request(
    coder: ImageCoder,
) -> None:
    inputs = Inputs()
    one = edit_of(inputs)
    assert one.edit is not None
    broken = inputs.put(png(template((64, 64)))[:60])
    one = replace(one, edit=replace(one.edit, image=broken))
    with pytest.raises(RequestFailed) as failed:
        await EditImages(inputs, coder).pixels(one)
    assert failed.value.stage == "image"


async def test_an_image_larger_than_what_is_kept_pushes_no_other_out() -> None:
    inputs, reader = Inputs(), Reader()
    images = EditImages(inputs, reader, most_bytes=2 * 64 * 64 * 3)
    small = edit_of(inputs)
    await images.pixels(small)
    await images.pixels(replace(small, width_px=128, height_px=128))
    assert reader.num_read == 2
    await images.pixels(small)
    assert reader.num_read == 2


@pytest.mark.parametrize("error", [MemoryError("full"), OSError("no process")])
async def test_an_unusual_error_of_reading_ends_the_request(error: Exception) -> None:
    class Failing(Inputs):
        def get(self, _owner: str, _ref: BlobRef) -> bytes | None:
            raise error

    inputs = Failing()
    with pytest.raises(RequestFailed) as failed:
        await EditImages(inputs, Reader()).pixels(edit_of(inputs))
    assert failed.value.stage == "image"


class HeldReader(Reader):
    """Decodes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[str, Future[EditPixels]]] = []

    def edit_pixels(
        self,
        _image: bytes,
        _mask: bytes | None,
        _edit: Any,
        work_px: tuple[int, int],
        client: str = "",
    ) -> Future[EditPixels]:
        done: Future[EditPixels] = Future()
        self.held.append((client, done))
        return done


async def test_files_of_edits_that_wait_are_not_fetched_and_no_client_waits_for_another() -> None:
    class Anybodys(Inputs):
        def get(self, owner: str, ref: BlobRef) -> bytes | None:
            return super().get(OWNER, ref)

    inputs, reader = Anybodys(), HeldReader()
    images = EditImages(inputs, reader)
    many = [replace(edit_of(inputs, f"e{n}"), width_px=64 + 8 * n) for n in range(5)]
    other = replace(many[0], owner="bob")
    reading = [asyncio.create_task(images.pixels(one)) for one in (*many, other)]
    await until(lambda: len(reader.held) == 3, "the edits whose turn it is")
    assert sorted(client for client, _ in reader.held) == [OWNER, OWNER, "bob"]
    # an image and a mask each
    assert len(inputs.asked) == 6
    while reader.held:
        blank = np.zeros((64, 64, 3), np.uint8)
        reader.held.pop()[1].set_result(EditPixels(blank, None, blank, None))
        num_left = sum(not one.done() for one in reading)
        await until(lambda left=num_left: sum(not one.done() for one in reading) < left, "one more")
        await asyncio.sleep(0.01)
    await asyncio.gather(*reading)
    assert len(inputs.asked) == 12
