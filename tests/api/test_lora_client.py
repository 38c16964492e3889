"""LoRAs by the official client on a real socket: the current one, the older one, and streams."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from fastapi import FastAPI

from tests.api import lora_scenario
from tests.api.clients import run_scenario
from tests.api.conftest import Serve
from tests.api.edit_calls import IMAGE
from tests.fake_loras import ready_lora
from tests.fakes import FakeDispatcherClient


@pytest.mark.parametrize("older", [False, True], ids=["current client", "older client"])
def test_the_official_client_uses_loras(
    app: FastAPI, fake: FakeDispatcherClient, serve: Serve, tmp_path: Path, older: bool
) -> None:
    fake.registry.put(ready_lora("pastel"), ready_lora("outline"))
    (tmp_path / "image.png").write_bytes(IMAGE)
    run_scenario(lora_scenario.__file__, serve(app), str(tmp_path), older=older)
    named = [[use.name for use in offer[0].add_ons.loras] for offer in fake.offered]
    both = ["pastel", "outline"]
    assert named == [both, ["pastel"], [], both, ["outline"]]


def test_an_event_says_which_loras(app: FastAPI, fake: FakeDispatcherClient, serve: Serve) -> None:
    fake.registry.put(ready_lora("pastel"))
    client = openai.OpenAI(base_url=f"{serve(app)}/v1", api_key="any", timeout=60)
    [event] = client.images.generate(
        prompt="a", stream=True, extra_body={"loras": [{"name": "pastel", "scale": -0.5}]}
    )
    assert event.type == "image_generation.completed"
    assert event.model_extra is not None
    assert event.model_extra["loras"] == [{"name": "pastel", "scale": -0.5}]
