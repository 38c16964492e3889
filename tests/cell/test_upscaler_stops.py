"""An upscaler that dies in the middle of an image, in a cell without Ray."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.cell.local import LocalCell
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.replica.upscale.skill import UpscaleSkill
from tests.api.conftest import http_of
from tests.e2e.pixels import enlargement, pixels_differ
from tests.e2e.service import image_request, storage_in
from tests.jobs.jobs_cell import until


def config(folder: Path) -> ClusterConfig:
    """Nothing but a model and two upscalers."""
    pool = {"name": "shapes-sd", "model": "shapes-sd", "min_px": 32, "max_px": 64}
    return ClusterConfig.model_validate(
        {
            "http": {"open": True},
            "loras": {"num_stores": 0, "folder": str(folder / "loras")},
            "pools": [pool],
            "upscalers": [{"name": "big", "replicas": 2}],
            "storage": storage_in(folder),
        }
    )


async def made(http: httpx.AsyncClient, **fields: Any) -> bytes:
    body = image_request(seed=3, size="32x32", num_inference_steps=2, **fields)
    reply = await http.post("/v1/images/generations", json=body)
    assert reply.status_code == 200, reply.text
    return base64.b64decode(reply.json()["data"][0]["b64_json"])


async def test_another_enlarges_what_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Queue[UpscaleSkill]()
    enlarge = UpscaleSkill._enlarged
    hangs = [True]

    async def hanging_once(self: UpscaleSkill, *about: Any) -> bytes:
        begun.put_nowait(self)
        if hangs:
            hangs.clear()
            await asyncio.Event().wait()
        return await enlarge(self, *about)

    monkeypatch.setattr(UpscaleSkill, "_enlarged", hanging_once)
    async with LocalCell(config(tmp_path), is_brief=True) as cell, http_of(cell.app) as http:
        plain = await made(http)
        call = asyncio.create_task(made(http, upscale=2))
        first = await begun.get()
        [dying] = [one for one in cell._workers if one.skill is first]
        dying.give_up("it was killed")
        assert pixels_differ(await call, enlargement(plain, 2)) == 0
        second = await begun.get()
        assert second is not first
        results = tmp_path / "store" / "results"
        await until(lambda: not list(results.glob("*")))
