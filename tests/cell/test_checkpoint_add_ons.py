"""A LoRA and a ControlNet on a checkpoint in one file, beside the folder it was made from."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import diffusers
import httpx
import pytest
from PIL import Image

from tests.cell.local_service import running_locally
from tests.cell.test_fallback import coded, file_of
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS
from tests.engine.checkpoints import KINDS, save_kind
from tests.engine.random_controlnets import random_map, save_controlnets
from tests.engine.random_loras import save_loras

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("local"), pytest.mark.timeout(300)]


def test_both_make_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    models = dict(zip(("folder", "file"), save_kind(tmp_path, KINDS["sd15"]), strict=True))
    base = diffusers.DiffusionPipeline.from_pretrained(models["folder"], safety_checker=None)
    [net], [lora] = save_controlnets(base, tmp_path, 1), save_loras(base, tmp_path, 1)
    defaults = {"size": "64x64", "num_inference_steps": 4, "sampler": "euler"}
    pools = [
        {"name": name, "model": str(model), "max_px": 64, "defaults": defaults}
        for name, model in models.items()
    ]
    registered = [{"name": f"of-{one}", "base": one, "source": str(lora)} for one in models]
    nets = [{"name": "net", "model": str(net), "bases": list(models), "num_cpus": 0.2}]
    more: dict[str, Any] = {"pools": pools, "cascades": [], "discriminators": []}
    more |= {"controlnets": nets}
    more["loras"] = {
        "folder": str(tmp_path / "loras"),
        "sources": [str(tmp_path)],
        "registered": registered,
    }
    drawn = coded(file_of(Image.fromarray(random_map(0, 64, 64))))
    with running_locally(tmp_path / "cell", **more) as service:

        def made(model: str, **fields: Any) -> bytes:
            body = {"prompt": "a red circle", "model": model, "seed": 5, "guidance_scale": 3}
            url = f"{service.url}/v1/images/generations"
            reply = httpx.post(url, json=body | fields, headers=HEADERS, timeout=120)
            assert reply.status_code == 200, reply.text
            return base64.b64decode(reply.json()["data"][0]["b64_json"])

        found = {
            model: [
                made(model),
                made(model, loras=[{"name": f"of-{model}", "scale": 1.0}]),
                made(model, controlnets=[{"name": "net", "image": drawn}]),
                made(
                    model,
                    loras=[{"name": f"of-{model}", "scale": 0.7}],
                    controlnets=[{"name": "net", "image": drawn}],
                ),
            ]
            for model in models
        }
    for one, other in zip(found["folder"], found["file"], strict=True):
        assert pixels_differ(one, other) <= 1
    for place, one in enumerate(found["file"]):
        assert all(pixels_differ(one, other) > 10 for other in found["file"][:place])
