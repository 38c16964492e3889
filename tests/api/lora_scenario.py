"""What an application does with LoRAs by the official client, of any version from 1.x on.

Usage: ``python lora_scenario.py URL FOLDER``, with ``image.png`` in the folder. Prints the client's
version at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

LORAS: list[dict[str, Any]] = [{"name": "pastel", "scale": 0.8}, {"name": "outline"}]
SAID = [{"name": "pastel", "scale": 0.8}, {"name": "outline", "scale": 1.0}]


def said(reply: Any) -> Any:
    assert reply.data
    return reply.data[0].model_extra.get("loras")


def generations(client: openai.OpenAI) -> None:
    reply = client.images.generate(prompt="a red circle", extra_body={"loras": LORAS})
    assert said(reply) == SAID
    # where an application lets its user choose nothing but the model
    names = [one.id for one in client.models.list()]
    assert names == ["shapes", "shapes:outline", "shapes:pastel"]
    one = client.models.retrieve("shapes:pastel")
    assert one.model_extra is not None
    assert one.model_extra["parent"] == "shapes"
    reply = client.images.generate(prompt="a red circle", model="shapes:pastel")
    assert said(reply) == [{"name": "pastel", "scale": 1.0}]
    assert said(client.images.generate(prompt="a red circle")) is None


def edits(client: openai.OpenAI, image: bytes) -> None:
    more = {"loras": json.dumps(LORAS)}
    assert said(client.images.edit(image=image, prompt="a", extra_body=more)) == SAID
    assert said(client.images.edit(image=image, prompt="a", model="shapes:outline")) == SAID[1:]
    with pytest.raises(openai.BadRequestError, match="as one text of JSON"):
        client.images.edit(image=image, prompt="a", extra_body={"loras": LORAS})


def errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a", extra_body={"loras": [{"name": "pastell"}]})
    assert (caught.value.code, caught.value.param) == ("lora_not_found", "loras")
    with pytest.raises(openai.NotFoundError, match="Did you mean 'shapes:pastel'"):
        client.images.generate(prompt="a", model="shapes:pastell")


def main(url: str, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=60, max_retries=0)
    generations(client)
    edits(client, (folder / "image.png").read_bytes())
    errors(client)
    sys.stdout.write(openai.__version__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
