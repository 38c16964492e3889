"""Edits by the official client on a real socket: the current one, the older one, and streams."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fastapi import FastAPI
from openai.types import ImageEditCompletedEvent, ImageEditPartialImageEvent

from ray_cluster.api.output.image_schemas import CompletedEvent, PartialImageEvent
from tests.api import edit_scenario
from tests.api.checks import error_of
from tests.api.clients import run_scenario
from tests.api.conftest import Serve, make
from tests.api.edit_calls import EDITS, IMAGE, MASK, PROMPT, WHOLE_MASK, coded, parts
from tests.fakes import FakeDispatcherClient
from tests.jobs.jobs_cell import Replica


@pytest.mark.parametrize("older", [False, True], ids=["current client", "older client"])
def test_the_official_client_edits_and_varies(
    app: FastAPI, fake: FakeDispatcherClient, serve: Serve, tmp_path: Path, older: bool
) -> None:
    (tmp_path / "image.png").write_bytes(IMAGE)
    (tmp_path / "mask.png").write_bytes(MASK)
    run_scenario(edit_scenario.__file__, serve(app), str(tmp_path), older=older)
    edits = [offer[0].edit for offer in fake.offered]
    assert [one.strength for one in edits if one is not None] == [0.8, 0.5, 0.8, 0.6, 0.8]


# streams, over a real dispatcher


async def drain(reply: Any) -> list[Any]:
    return [event async for event in reply]


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}], ids=["attached", "a job"])
async def test_an_edit_streams_its_own_events(
    client: openai.AsyncOpenAI, replica: Replica, headers: dict[str, str]
) -> None:
    reply = await client.images.edit(
        image=IMAGE,
        mask=MASK,
        prompt=PROMPT,
        stream=True,
        partial_images=2,
        extra_headers=headers,
        extra_body={"strength": 0.5, "num_inference_steps": 20},
    )
    making = asyncio.create_task(make(replica))
    events = await drain(reply)
    await making
    *previews, image = events
    assert previews
    for event in previews:
        assert isinstance(event, ImageEditPartialImageEvent)
        assert event.type == "image_edit.partial_image"
        assert (event.model_extra or {})["num_steps"] == 10
        jsonschema.validate(event.model_dump(), PartialImageEvent.model_json_schema())
    assert isinstance(image, ImageEditCompletedEvent)
    assert (image.type, base64.b64decode(image.b64_json)) == ("image_edit.completed", b"the image")
    assert (image.usage.total_tokens, image.size) == (0, "64x64")
    extra = image.model_extra or {}
    assert (extra["num_inference_steps"], extra["edit"]["strength"]) == (20, 0.5)
    jsonschema.validate(image.model_dump(exclude_none=True), CompletedEvent.model_json_schema())


async def test_a_whole_mask_streams_as_the_edit_that_was_asked_for(
    client: openai.AsyncOpenAI, replica: Replica
) -> None:
    reply = await client.images.edit(image=IMAGE, mask=WHOLE_MASK, prompt=PROMPT, stream=True)
    making = asyncio.create_task(make(replica))
    [image] = await drain(reply)
    await making
    assert image.type == "image_edit.completed"
    assert "edit" not in (image.model_extra or {})


async def test_a_refusal_of_a_stream_has_a_status_of_its_own(url: str) -> None:
    async with httpx.AsyncClient() as http:
        fields = {"prompt": PROMPT, "stream": True, "n": 2}
        reply = await http.post(url + EDITS, files=parts({"image": IMAGE}, fields))
    assert (reply.status_code, error_of(reply)["param"]) == (400, "n")


def test_the_openapi_document_describes_edits(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    edit, variation = (paths[f"/v1/images/{name}"]["post"] for name in ("edits", "variations"))
    assert (edit.get("deprecated", False), variation["deprecated"]) == (False, True)
    for operation, has_mask in (
        (edit, True),
        (variation, False),
        (paths["/v1/jobs"]["post"], True),
    ):
        content = operation["requestBody"]["content"]
        form = content["multipart/form-data"]["schema"]
        assert form["properties"]["image"]["format"] == "binary"
        assert ("mask" in form["properties"]) is has_mask
        assert "image" in form["required"]
        schema = content["application/json"]["schema"]
        as_json = schema.get("anyOf", [schema])[-1]
        assert ("mask" in as_json["properties"]) is has_mask
        check = jsonschema.Draft202012Validator(as_json).is_valid
        call = {"prompt": PROMPT}
        assert check({**call, "image": coded(IMAGE)})
        assert check({**call, "images": [{"image_url": coded(IMAGE)}]})
        assert not check(call)
        assert not check({**call, "image": coded(IMAGE), "images": [coded(IMAGE)]})
        assert {"strength", "feather_px", "crop", "seed"} <= form["properties"].keys()
    events = edit["responses"]["200"]["content"]["text/event-stream"]["schema"]["anyOf"]
    names = [one["properties"]["event"]["const"] for one in events]
    assert names == ["image_edit.partial_image", "image_edit.completed", "error"]
