"""The Serve deployment: HTTP in, images of the pipeline out."""

from __future__ import annotations

import asyncio
import binascii
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import BackpressureConfig

from benchmarks.baselines.batcher import Batcher, Dropped
from benchmarks.baselines.pipeline import BaselinePipeline, Call
from benchmarks.baselines.settings import BaselineSettings, shape_name
from ray_cluster.imaging.encoder import Pixels, encode_image
from ray_cluster.requests import OutputSpec

DROPPED = "deadline_missed"
# requests in the replica, where they can be grouped and dropped, before Serve's own queue fills:
# its router knows nothing of sizes and deadlines
_IN_REPLICA, _IN_ROUTER, _UNBOUNDED = 32, 32, 10_000
_START = re.compile(r"t=(\d+(?:\.\d+)?)")
_PNG = OutputSpec(metadata=False)


class Body(BaseModel):
    """A generation call."""

    prompt: str
    size: str = Field(pattern=r"^[1-9]\d{1,3}x[1-9]\d{1,3}$")
    num_inference_steps: int = Field(ge=1, le=1000)
    guidance_scale: float = Field(ge=0)
    seed: int = Field(ge=0)
    sampler: Literal["ddim"] = "ddim"
    slo_s: float = Field(math.inf, gt=0, description="seconds from the call to its deadline")

    def call(self, sent_s: float) -> Call:
        """Return it as the pipeline's, sent at this Unix time."""
        width, height = map(int, self.size.split("x"))
        steps, deadline_s = self.num_inference_steps, sent_s + self.slo_s
        return Call(self.prompt, width, height, steps, self.guidance_scale, self.seed, deadline_s)


class Baseline:
    """One pipeline behind one queue.

    Attributes:
        counts: what became of requests so far.
    """

    def __init__(self, settings: BaselineSettings) -> None:
        self._settings = settings
        self._pipeline = BaselinePipeline(settings.model, settings.dtype)
        self._batcher: Batcher[Call, tuple[Pixels, float]] | None = None
        self.counts: Counter[str] = Counter()

    async def generate(self, body: Body, sent_s: float) -> JSONResponse:
        """Make one image."""
        self.counts["accepted"] += 1
        if self._batcher is None:
            is_static = self._settings.batching == "static"
            self._batcher = Batcher(
                self._make,
                key_of=lambda call: call.key,
                max_batch=self._settings.max_batch if is_static else 1,
                wait_s=self._settings.wait_s if is_static else 0.0,
                is_hopeless=self._is_hopeless,
            )
        try:
            pixels, work_s = await self._batcher.submit(body.call(sent_s))
        except Dropped:
            self.counts["dropped"] += 1
            error = {"message": "The deadline can't be met any more.", "code": DROPPED}
            return JSONResponse({"error": error}, 503)
        # zlib gives the interpreter back meanwhile
        png = await asyncio.to_thread(encode_image, pixels, _PNG, {})
        self.counts["completed"] += 1
        image = {
            "b64_json": binascii.b2a_base64(png, newline=False).decode(),
            "num_inference_steps": body.num_inference_steps,
            "timing": {"work_s": work_s},
        }
        return JSONResponse({"data": [image]})

    def _is_hopeless(self, call: Call, now_s: float) -> bool:
        shape = shape_name(call.width_px, call.height_px, call.num_steps)
        is_late = now_s + self._settings.alone_s.get(shape, 0.0) > call.deadline_s
        return self._settings.is_guarded and is_late

    def _make(self, calls: Sequence[Call]) -> list[tuple[Pixels, float]]:
        started_s = time.perf_counter()
        images = self._pipeline.make(calls)
        took_s = time.perf_counter() - started_s
        return [(image, took_s) for image in images]


def build_app(baseline: Baseline) -> FastAPI:
    """Return the HTTP application around a baseline."""
    app = FastAPI()

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.get("/counts")
    async def counts() -> dict[str, int]:
        return baseline.counts

    @app.post("/v1/images/generations")
    async def generate(body: Body, x_request_start: str = Header("")) -> Any:
        # as load balancers set it; without it the call's way here does not count
        found = _START.fullmatch(x_request_start)
        return await baseline.generate(body, float(found[1]) if found else time.time())

    return app


@serve.ingress()
class Deployment:
    """Serves the application; Serve calls these two methods."""

    def __init__(self, settings: BaselineSettings) -> None:
        self._baseline = Baseline(settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application."""
        return build_app(self._baseline)


def bind(settings: BaselineSettings) -> Any:
    """Return the application; a guarded one refuses what its queues can't hold."""
    deployment: Any = serve.deployment(
        Deployment,
        num_replicas=1,
        max_ongoing_requests=_IN_REPLICA if settings.is_guarded else _UNBOUNDED,
        max_queued_requests=_IN_ROUTER if settings.is_guarded else -1,
        # 503 without it
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": 1},
    )
    return deployment.bind(settings)
