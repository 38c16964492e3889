"""Any upload is an image or a refusal of the right form: never a 5xx, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.storage.inputs import InputStore
from tests.api.checks import error_of
from tests.api.conftest import app_of, http_of, shapes_config, shapes_profile
from tests.api.edit_calls import EDITS, PROMPT, VARIATIONS, coded, mask_of, parts, picture
from tests.fakes import FakeDispatcherClient
from tests.imaging.hostile import bombs, hostile_files, peak_bytes, reader_of, regular_files

logger = logging.getLogger(__name__)

MAX_PIXELS = 1 << 20
MIB = 1 << 20
# of the size that most of the hostile files have, or had
IMAGE, MASK = picture(40, 24), mask_of((8, 4, 20, 10), 40, 24)
# values of any field, as texts of a form
VALUES = (
    *("", " ", "0", "1", "0.5", "-1", "1e999", "NaN", "null", "true", "False", "[]", "{}", "[["),
    *(
        "auto",
        "64x64",
        "72x64",
        "high",
        "low",
        "png",
        "webp",
        "\0",
        "\x85",
        "🙂",
        '["steps"]',
        "9" * 99,
    ),
)
NAMES = (
    *("strength", "feather_px", "paste_back", "crop", "input_fidelity", "n", "size", "seed"),
    *("num_inference_steps", "min_inference_steps", "allow", "fidelity", "quality", "background"),
    *("output_format", "output_compression", "negative_prompt", "guidance_scale", "sampler"),
    *("stream", "partial_images", "user", "svg[model]", "markup", "loras[][name]", "x", "image"),
)


@pytest.fixture(scope="module")
def coder() -> Iterator[ImageCoder]:
    """What decodes in the service: a process of its own, with bounded memory."""
    with ImageCoder() as one:
        yield one


class Uploader:
    """Sends files and fields that are made up, in forms and in JSON; the same for a seed."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._rng = random.Random(seed)

    async def send(self, file: bytes) -> httpx.Response:
        """Send a file as the image or as the mask of a call, or good ones with wild fields."""
        rng = self._rng
        files, fields = self._files(file), {"prompt": PROMPT}
        if rng.random() < 0.25 or file not in files.values():
            names = rng.sample(NAMES, rng.choice([1, 1, 2, 5]))
            fields |= {name: rng.choice(VALUES) for name in names}
        url = VARIATIONS if rng.random() < 0.1 else EDITS
        if rng.random() < 0.7:
            return await self._form(url, files, fields)
        texts = {name: self._text(data) for name, data in files.items()}
        return await self._http.post(url, json=fields | texts)

    def _files(self, file: bytes) -> dict[str, bytes]:
        match self._rng.randrange(6):
            case 0 | 1 | 2:
                return {"image": file}
            case 3:
                return {"image": file, "mask": MASK}
            case 4:
                return {"image": IMAGE, "mask": file}
        return {"image": IMAGE, "mask": MASK}

    async def _form(
        self, url: str, files: dict[str, bytes], fields: dict[str, str]
    ) -> httpx.Response:
        rng = self._rng
        request = self._http.build_request("POST", url, files=parts(files, fields))
        body = await request.aread()
        if rng.random() < 0.05:
            body = body[: rng.randrange(len(body))]
        headers = {"content-type": request.headers["content-type"]}
        return await self._http.post(url, content=body, headers=headers)

    def _text(self, data: bytes) -> object:
        text = coded(data)
        rng = self._rng
        return rng.choice(
            [text, f"data:image/gif;base64,{text}", {"image_url": text}, text, [text], text[:-1]]
        )


class SeveralUploader(Uploader):
    """Sends several files at once: some good, some hostile, under all sorts of names."""

    async def send(self, file: bytes) -> httpx.Response:
        rng, model = self._rng, self._rng.choice(["eyes", "eyes", "eyes", "shapes"])
        count = rng.choice([1, 2, 2, 3, 5, 5, 16, 17, 40])
        files = [IMAGE, picture(24, 40), *rng.choices([IMAGE, file, b"", file[:99]], k=count)]
        files = rng.sample(files, count)
        if rng.random() < 0.4:
            files = [IMAGE if rng.random() < 0.9 else one for one in files]
        url = VARIATIONS if rng.random() < 0.05 else EDITS
        if rng.random() < 0.3:
            return await self._json(url, {"prompt": PROMPT, "model": model}, files)
        names = rng.choice([["image"], ["image[]"], ["image", "image[]"], ["image[0]", "images"]])
        sent: list[tuple[str, Any]] = parts({}, {"prompt": PROMPT, "model": model})
        sent += [(rng.choice(names), ("f.png", one)) for one in files]
        if rng.random() < 0.3:
            sent.append((rng.choice(["mask", "mask[]", "x", "image"]), ("f.png", file)))
        if rng.random() < 0.2:
            sent.append((rng.choice([*names, "strength"]), (None, rng.choice(VALUES))))
        rng.shuffle(sent)
        request = self._http.build_request("POST", url, files=sent)
        body = await request.aread()
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body))]
        headers = {"content-type": request.headers["content-type"]}
        return await self._http.post(url, content=body, headers=headers)

    async def _json(self, url: str, body: dict[str, Any], files: list[bytes]) -> httpx.Response:
        rng = self._rng
        given: list[object] = [
            self._text(one) if rng.random() < 0.1 else coded(one) for one in files
        ]
        if rng.random() < 0.2:
            wild = [None, 7, {}, [], {"file_id": "file-x"}, {"image_url": None}, "https://a.org"]
            given[rng.randrange(len(given))] = rng.choice(wild)
        body |= {rng.choice(["image", "images"]): rng.choice([given, given, given, [given]])}
        if rng.random() < 0.1:
            body["mask"] = rng.choice([coded(MASK), given])
        return await self._http.post(url, json=body)


async def fuzz(
    coder: ImageCoder, num_files: int, seed: int, folder: str, kind: type[Uploader] = Uploader
) -> Counter[int]:
    eyes = replace(shapes_profile(), model="eyes", edits="none", max_references=16)
    fake = FakeDispatcherClient(shapes_profile(), eyes)
    inputs = InputStore.open(folder, grace_s=3600.0)
    config = shapes_config()
    limits = config.limits.model_copy(update={"max_input_pixels": MAX_PIXELS})
    app = app_of(
        fake, config.model_copy(update={"limits": limits}), images=SentImages(inputs, coder)
    )
    statuses: Counter[int] = Counter()
    async with http_of(app, raise_app_exceptions=True) as http:
        uploader = kind(http, seed)
        for file in hostile_files(num_files, seed):
            num_offered = len(fake.offered)
            async with asyncio.timeout(60):
                reply = await uploader.send(file)
            statuses[reply.status_code] += 1
            assert reply.status_code < 500, reply.text
            is_offered = len(fake.offered) > num_offered
            # a stream has begun with 200
            assert is_offered is (reply.status_code == 200), reply.text
            if is_offered:
                check_offer(fake, reply)
            else:
                error_of(reply)
    most = max(len(one[0].references) for one in fake.offered)
    assert most == (16 if kind is SeveralUploader else 0)
    return statuses


def check_offer(fake: FakeDispatcherClient, reply: httpx.Response) -> None:
    for request in fake.offered[-1]:
        edit = request.edit
        assert request.num_steps >= 1
        assert all(side % 8 == 0 and 32 <= side <= 256 for side in request.size_px)
        if edit is not None:
            assert 0 < edit.mask_ratio <= 1
            assert 0 < edit.strength <= 1
            assert request.first_step >= 0
    if not reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.json()["size"] == "{}x{}".format(*fake.offered[-1][0].output_px)


def present_bytes() -> int:
    """Return the memory that this process has now, without what nothing refers to."""
    gc.collect()
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("kind", "num_uploads"),
    [
        (Uploader, 250),
        pytest.param(Uploader, 1000, marks=pytest.mark.slow),
        (SeveralUploader, 60),
        pytest.param(SeveralUploader, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=["few", "a thousand", "few of several", "a thousand of several"],
)
def test_hostile_uploads_are_images_or_clear_refusals(
    coder: ImageCoder, tmp_path: Path, num_uploads: int, kind: type[Uploader]
) -> None:
    process_id = reader_of(coder)
    # those that are made once stay
    assert bombs()
    assert regular_files()
    before = present_bytes()
    statuses = asyncio.run(fuzz(coder, num_uploads, 34, str(tmp_path), kind))
    logger.info("statuses: %s", dict(statuses))
    assert statuses.total() == num_uploads
    # both ends are reached
    assert statuses[200] > 0.04 * num_uploads
    assert statuses[400] > 0.3 * num_uploads
    # no file has ended the process that decodes, and neither has grown with the files
    assert coder.process_ids == [process_id]
    assert peak_bytes(process_id) < 12 * MAX_PIXELS + 150 * MIB
    grown = present_bytes() - before
    logger.info("grown by %.0f MiB", grown / MIB)
    assert grown < 60 * MIB
