"""A service with ControlNets, and calls that name them."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
from PIL import Image

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.imaging.detectors import Pixels
from ray_cluster.requests import BlobRef, ImageRequest
from ray_cluster.storage.inputs import OPEN_OWNER, InputStore
from tests.api.conftest import NOW_S, http_of, shapes_config, shapes_profile
from tests.api.edit_calls import coded
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for
from tests.imaging.pictures import file_of

RED = {"prompt": "a red circle"}
# black strokes on white
SKETCH_PIXELS = np.full((48, 80, 3), 255, np.uint8)
SKETCH_PIXELS[12:36, 20:60] = 0
SKETCH = file_of(SKETCH_PIXELS)
CONTROLNETS = [
    {
        "name": "edges",
        "model": "shapes-sd-edges",
        "bases": ["shapes"],
        "description": "lines, white on black",
    },
    {"name": "layout", "model": "shapes-sd-layout", "bases": ["shapes", "late"], "mode": "local"},
    {"name": "poses", "model": "some/poses", "bases": ["late"]},
    {"name": "tokens", "model": "some/tokens", "bases": ["flux"]},
]


def controls_config() -> ClusterConfig:
    given = shapes_config().model_dump()
    given["pools"] = [*given["pools"], {"name": "flux", "model": "some/flux"}]
    given["http"] = given["ray"] = given["storage"] = {}
    return ClusterConfig.model_validate({**given, "controlnets": CONTROLNETS})


def controls_fake() -> FakeDispatcherClient:
    late = replace(shapes_profile(), model="late")
    flux = replace(shapes_profile(), model="flux", family="flux")
    return FakeDispatcherClient(shapes_profile(), late, flux)


@asynccontextmanager
async def controls_http(
    fake: FakeDispatcherClient, url: str, **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a gateway whose images are kept at a URL."""
    config = controls_config()
    config = config.model_copy(update={"limits": config.limits.model_copy(update=limits)})
    app = create_app(
        fake,
        settings_for(config),
        clock=lambda: NOW_S,
        results=memory_results(),
        images=sent_images(url),
    )
    async with http_of(app, raise_app_exceptions=False) as http:
        yield http


def entry(name: str = "edges", image: bytes = SKETCH, **more: Any) -> dict[str, Any]:
    return {"name": name, "image": coded(image), **more}


def stored(url: str, ref: BlobRef) -> bytes:
    """Return what the open service's clients have sent, or had made."""
    data = InputStore.open(url, grace_s=3600.0).get(OPEN_OWNER, ref)
    assert data is not None
    assert len(data) == ref.num_bytes
    return data


def map_of(url: str, request: ImageRequest, index: int = 0) -> Pixels:
    """Return the pixels of a request's map."""
    ref = request.add_ons.controls[index].image
    assert ref in request.inputs
    with Image.open(io.BytesIO(stored(url, ref))) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.array(image)
