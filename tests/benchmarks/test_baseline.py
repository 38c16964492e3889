"""A baseline as it is served: what it answers, when it refuses, and that nothing stays."""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks.baselines.pipeline import BaselinePipeline, Call
from benchmarks.serving.compare import CONTENDERS
from benchmarks.serving.services import Baseline, running

BODY = {
    "prompt": "a large red circle in the center on a black background",
    "size": "64x64",
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "seed": 7,
}
FLOOD = 100


@pytest.mark.ray
@pytest.mark.slow
def test_guarded_baseline_answers_drops_and_refuses() -> None:
    guarded = CONTENDERS["static/guarded"]
    assert isinstance(guarded, Baseline)
    contender = replace(guarded, alone_s={"64x64/2": 0.5})
    with running(contender) as service:
        url = service.url
        with service.client() as client:
            reply = client.post("/v1/images/generations", json=BODY).raise_for_status()
            image = base64.b64decode(reply.json()["data"][0]["b64_json"])

            def status(slo_s: float) -> int:
                headers = {"X-Request-Start": f"t={time.time():.3f}"}
                body = {**BODY, "slo_s": slo_s}
                return client.post("/v1/images/generations", json=body, headers=headers).status_code

            # its settings say that it takes half a second alone
            assert status(0.4) == 503
            assert status(30.0) == 200
            assert client.post("/v1/images/generations", json={"prompt": "x"}).status_code == 422
            with ThreadPoolExecutor(FLOOD) as threads:
                flood = Counter(threads.map(lambda _: status(60.0), range(FLOOD)))
        assert set(flood) == {200, 429}
        # as many as the replica and Serve's queue hold
        assert flood[200] >= 32
        counts = contender.counts(url)
    assert (counts.dropped, counts.failed, counts.open) == (1, 0, 0)
    assert counts.completed == flood[200] + 2
    call = Call(str(BODY["prompt"]), 64, 64, 2, 2.0, 7, 0.0)
    [alone] = BaselinePipeline("shapes-sd", "float32").make([call])
    seen = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
    assert np.abs(seen.astype(int) - alone.astype(int)).max() <= 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/readyz", timeout=5)
