"""What an application does to edit images with the official client, of any version from 1.x on.

Usage: ``python edit_scenario.py URL FOLDER``, with ``image.png`` and ``mask.png`` in the folder.
Prints the client's version at the end.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest


def edits(client: openai.OpenAI, image: bytes, mask: bytes) -> None:
    # bytes have no name, and no content type that says anything
    reply = client.images.edit(
        image=image,
        mask=mask,
        prompt="a red circle",
        n=2,
        size="auto",
        quality="high",
        background="auto",
        input_fidelity="high",
        output_format="png",
        response_format="b64_json",
        user="someone",
        extra_body={"seed": 7, "feather_px": 2, "num_inference_steps": 20, "paste_back": True},
    )
    assert reply.data is not None
    assert [base64.b64decode(one.b64_json or "") for one in reply.data] == [b"coded pixels"] * 2
    extra = reply.data[1].model_extra
    assert extra is not None
    assert (extra["seed"], extra["num_inference_steps"]) == (8, 20)
    assert extra["edit"] == {"strength": 0.8, "mask_ratio": 0.25, "crop": None}
    assert (reply.size, reply.background, reply.quality) == ("64x64", "opaque", "auto")


def lists_and_files(client: openai.OpenAI, image: bytes, path: Path) -> None:
    """A list of one, a file with a name, and an extension that is a list."""
    more = {"allow": json.dumps(["steps"]), "min_inference_steps": 4, "strength": 0.5}
    with path.open("rb") as file:
        client.images.edit(image=[file], prompt="a", extra_body=more)
    client.images.edit(image=("a.gif", io.BytesIO(image), "image/gif"), prompt="a")
    rejected(client, "allow[]", image=image, extra_body={"allow": ["steps"]})
    rejected(client, "loras[][name]", image=image, extra_body={"loras": [{"name": "x"}]})
    rejected(client, "image", image=[image, image])
    rejected(client, "image[]", image=[image] * 17)
    rejected(client, "mask", image=image, mask=image)
    rejected(client, "svg[model]", image=image, extra_body={"svg": {"model": "x"}})


def rejected(client: openai.OpenAI, param: str, **fields: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(prompt="a", **fields)
    assert caught.value.param == param, caught.value
    assert repr(param) in caught.value.message


def variations(client: openai.OpenAI, image: bytes) -> None:
    reply = client.images.with_raw_response.create_variation(image=image, n=2)
    assert reply.headers["deprecation"] == "true"
    assert len(reply.parse().data or ()) == 2


def streams(client: openai.OpenAI, url: str, image: bytes) -> None:
    """The older client knows nothing of streams: what it would send is sent for it."""
    fields = {"prompt": "a red circle", "stream": True, "partial_images": 1}
    if openai.__version__.startswith("1."):
        text = httpx.post(
            f"{url}/v1/images/edits",
            files={"image": ("upload", image)},
            data={name: json.dumps(value).strip('"') for name, value in fields.items()},
        ).text
        assert "event: image_edit.completed\n" in text, text
        return
    events = list(client.images.edit(image=image, **fields))  # type: ignore[call-overload]
    assert [one.type for one in events] == ["image_edit.completed"]
    assert events[0].usage.total_tokens == 0
    assert base64.b64decode(events[0].b64_json) == b"coded pixels"


def main(url: str, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=60, max_retries=0)
    image, mask = ((folder / name).read_bytes() for name in ("image.png", "mask.png"))
    edits(client, image, mask)
    lists_and_files(client, image, folder / "image.png")
    variations(client, image)
    streams(client, url, image)
    sys.stdout.write(openai.__version__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
