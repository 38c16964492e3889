"""What an application does with the official client; runs under any version of it from 1.x on.

Usage: ``python openai_scenario.py URL API_KEY``. Prints OK and the client's version at the end.
"""

from __future__ import annotations

import base64
import io
import json
import sys

import httpx
import openai
import pytest
from PIL import Image, ImageChops

PROMPT = "a large red circle in the center on a black background"


class Counter:
    """Counts the HTTP calls that a client makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _request: httpx.Request) -> None:
        """Count one."""
        self.calls += 1


def client(url: str, key: str, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, **options)  # type: ignore[arg-type]


def expect(error: type[Exception], call: object, **fields: object) -> openai.APIStatusError:
    """Return the error that a call must end with."""
    with pytest.raises(error) as raised:
        call(**fields)  # type: ignore[operator]
    assert isinstance(raised.value, openai.APIStatusError)
    return raised.value


def succeeds(url: str, key: str) -> None:
    reply = client(url, key).images.generate(model="shapes-sd", prompt=PROMPT, n=2, size="96x64")
    assert reply.data is not None
    assert len(reply.data) == 2
    images = [Image.open(io.BytesIO(base64.b64decode(item.b64_json or ""))) for item in reply.data]
    assert [image.size for image in images] == [(96, 64)] * 2
    assert images[0].tobytes() != images[1].tobytes()
    assert images[0].info, "a png carries its recipe"
    # others register LoRAs, each a name of its own
    names = [model.id for model in client(url, key).models.list()]
    served = [name for name in names if ":" not in name]
    assert "shapes-sd:pastel" in names
    assert served == ["shapes-sd", "shapes-sd-light", "shapes-auto"]


def streams(url: str, key: str) -> None:
    """The older client knows nothing of streams: it is given what it would send."""
    body = {"prompt": PROMPT, "stream": True, "partial_images": 2, "seed": 7, "size": "64x64"}
    body |= {"num_inference_steps": 60}
    headers = {"Authorization": f"Bearer {key}"}
    address = f"{url}/v1/images/generations"
    with httpx.stream("POST", address, json=body, headers=headers, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [
            json.loads(line.removeprefix("data: "))
            for line in reply.iter_lines()
            if line.startswith("data: ")
        ]
    *previews, completed = events
    assert completed["type"] == "image_generation.completed"
    assert previews, "an image of 60 steps is shown on the way"
    assert [event["partial_image_index"] for event in previews] == sorted(
        {event["partial_image_index"] for event in previews}
    )
    plain = {
        name: value for name, value in body.items() if name not in {"stream", "partial_images"}
    }
    [alone] = httpx.post(address, json=plain, headers=headers, timeout=60).json()["data"]
    image, other = (
        Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) for one in (completed, alone)
    )
    assert image.size == other.size == (64, 64)
    worst = max(high for _, high in ImageChops.difference(image, other).getextrema())
    assert worst <= 1, "previews change nothing"


def repeats_with_a_seed(url: str, key: str) -> None:
    options = {"seed": 7, "num_inference_steps": 5, "sampler": "euler_ancestral"}
    once, again = (
        client(url, key).images.generate(prompt=PROMPT, size="64x64", extra_body=options)
        for _ in range(2)
    )
    assert once.data is not None
    assert again.data is not None
    assert once.data[0].b64_json == again.data[0].b64_json


def gives_up_what_is_allowed(url: str, key: str) -> None:
    generate = client(url, key).images.generate

    def made(**options: object) -> tuple[Image.Image, dict[str, object]]:
        reply = generate(prompt=PROMPT, size="64x64", extra_body={"seed": 7, **options})
        assert reply.data is not None
        [item] = reply.data
        assert item.model_extra is not None
        picture = Image.open(io.BytesIO(base64.b64decode(item.b64_json or "")))
        return picture, item.model_extra["fidelity"]

    balanced, told = made(fidelity="balanced")
    assert (told["got"], told["steps_asked"], told["steps_computed"]) == ("balanced", 20, 8)
    plain, exact = made(num_inference_steps=8)
    assert (exact["got"], exact["steps_asked"], exact["budget_spent"]) == ("exact", 8, 0)
    assert max(high for _, high in ImageChops.difference(balanced, plain).getextrema()) <= 1
    # no deadline is as short as that: all is given up that may be
    _, hurried = made(slo_s=0.001, allow=["fidelity"])
    assert (hurried["asked"], hurried["got"], hurried["steps_computed"]) == ("exact", "fast", 5)
    _, patient = made(slo_s=0.001)
    assert (patient["got"], patient["steps_computed"]) == ("exact", 20)


def refuses(url: str, key: str) -> None:
    generate = client(url, key).images.generate
    error = expect(openai.BadRequestError, generate, prompt=PROMPT, size="65x64")
    assert error.param == "size", error
    assert "64" in str(error)
    error = expect(openai.BadRequestError, generate, prompt=PROMPT, background="transparent")
    assert error.param == "background"
    # a stream does not begin, either
    for more in ({}, {"stream": True}):
        error = expect(openai.BadRequestError, generate, prompt="red " * 200, extra_body=more)
        assert (error.param, error.code) == ("prompt", "string_above_max_length")
    expect(openai.NotFoundError, generate, prompt=PROMPT, model="dall-e-3")
    wrong = client(url, "wrong-key").images.generate
    expect(openai.AuthenticationError, wrong, prompt=PROMPT)


def fails_once(url: str, key: str, poisoned_word: str) -> None:
    """A model error is final: the client must not repeat it, with whatever ``max_retries``."""
    for options in ({}, {"max_retries": 0}):
        counter = Counter()
        http = httpx.Client(event_hooks={"request": [counter]})
        generate = client(url, key, http_client=http, **options).images.generate
        error = expect(openai.InternalServerError, generate, prompt=f"a {poisoned_word}")
        assert error.status_code == 500
        assert error.response.headers["x-request-id"]
        assert counter.calls == 1, counter.calls


def main() -> None:
    url, key, poisoned_word = sys.argv[1:]
    succeeds(url, key)
    streams(url, key)
    repeats_with_a_seed(url, key)
    gives_up_what_is_allowed(url, key)
    refuses(url, key)
    fails_once(url, key, poisoned_word)
    sys.stdout.write(f"OK {openai.__version__}\n")


if __name__ == "__main__":
    main()
