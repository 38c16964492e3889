"""Calls that schemathesis makes up from our own OpenAPI schema, against a cell with a replica."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.protocol.loras import Lora
from tests.api.checks import error_of
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.api.edit_calls import IMAGE, MASK, coded
from tests.api.wild_calls import WildCall, WildReply, made
from tests.fakes import registration
from tests.jobs.jobs_cell import JobsCell, Replica, until

CONFIG = ClusterConfig.model_validate(
    {
        "http": {"trusted_proxies": ["127.0.0.1"], "cors_origins": ["https://app.example.com"]},
        "pools": [
            {"name": "shapes", "model": "shapes-sd", "max_num_inference_steps": 50},
        ],
        "controlnets": [{"name": "edges", "model": "shapes-sd-edges", "bases": ["shapes"]}],
        # low, so that what the schema allows is mostly what the service takes
        "limits": {
            "max_prompt_chars": 60,
            "max_images_per_request": 3,
            "max_body_bytes": 4096,
            "max_stream_s": 0.5,
        },
    }
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
T = TypeVar("T")

# values that only the model or the service knows: the schema can't tell them
LORAS = tuple(f"lora-{index}" for index in range(8))
MODELS = ("shapes", "shapes", "shapes:lora-0")
SIZES = ("auto", "64x64", "96x32", "256x256")
CHOICES = {
    "size": SIZES,
    "model": MODELS,
    "base": ("shapes",),
    "source": ("builtin:pastel",),
    "preprocess": ("canny", "invert", "none"),
}
_OPERATIONS_WITH_BODY = 4
_MAX_KNOWN = 50


class FuzzedService:
    """The HTTP application over a real dispatcher and job store, on a loop of another thread.

    Attributes:
        statuses: how often each operation was answered with each status.
        job_ids, file_ids, digests: the last that replies have named; digests of uploaded files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self._loop = loop
        self.cell = JobsCell(folder, max_queued=1000)
        self.app = app_of(self.cell, CONFIG, results=self.cell.results)
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)
        self.job_ids: list[str] = []
        self.file_ids: list[str] = []
        self.digests: list[str] = []

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def start(self) -> None:
        self._run(self._start())

    async def _start(self) -> None:
        await self.cell.__aenter__()
        replica = Replica(self.cell, model="shapes")
        replica.epoch = await self.cell.dispatch.register(
            replace(registration("r", "shapes"), profile=shapes_profile())
        )
        for name in LORAS:
            await self.cell.add_lora(Lora("", name, "shapes", "builtin:pastel"))  # type: ignore[attr-defined]
        self.cell.add_controlnets("edges")
        self._working = asyncio.create_task(replica.work())
        self._http = http_of(self.app, raise_app_exceptions=True)

    def stop(self) -> None:
        self._run(self._stop())

    async def _stop(self) -> None:
        await self._http.aclose()
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
        await self.cell.__aexit__()

    def cases(self) -> st.SearchStrategy[Case]:
        """Calls of every operation; those with a body more often, one in five of them wrong."""
        schema = schemathesis.openapi.from_dict(self.app.openapi())
        operations = [found.ok() for found in schema.get_all_operations()]
        weighted = [
            operation
            for operation in operations
            for _ in range(_OPERATIONS_WITH_BODY if operation.method.lower() == "post" else 1)
        ]
        modes = [GenerationMode.POSITIVE] * 4 + [GenerationMode.NEGATIVE]

        def of(operation: Any, mode: GenerationMode) -> st.SearchStrategy[Case]:
            if not list(operation.iter_parameters()) and not operation.body:
                mode = GenerationMode.POSITIVE
            strategy: st.SearchStrategy[Case] = operation.as_strategy(generation_mode=mode)
            return strategy

        return st.sampled_from(weighted).flatmap(
            lambda operation: st.sampled_from(modes).flatmap(lambda mode: of(operation, mode))
        )

    def call(self, case: Case, pick: int) -> None:
        """Make a call and check its answer.

        Args:
            pick: chooses among values that the schema does not know, and none with 0.
        """
        self._fill_in(case, pick)
        sent = requests.Request(**_plain(case.as_transport_kwargs("http://gateway"))).prepare()
        reply = self._run(self._send(sent))
        assert reply.status_code < 500, reply.text
        case.validate_response(reply, checks=CHECKS)
        if reply.status_code >= 400:
            error_of(reply)
        label = f"{case.method.upper()} {case.operation.path}"
        self.statuses[label][int(reply.status_code)] += 1
        is_json = reply.headers.get("content-type", "").startswith("application")
        self._remember(reply.text if is_json else "")

    async def _send(self, sent: requests.PreparedRequest) -> httpx.Response:
        body = sent.body.encode() if isinstance(sent.body, str) else sent.body
        # a stream that does not end fails here
        async with asyncio.timeout(20):
            return await self._http.request(
                str(sent.method),
                str(sent.url),
                content=body,
                headers=[(k.encode("latin-1"), _raw(v)) for k, v in sent.headers.items()],
            )

    def _fill_in(self, case: Case, pick: int) -> None:
        if not pick:
            return
        body: Any = case.body
        if isinstance(body, dict):
            for name, choices in CHOICES.items():
                if isinstance(body.get(name), str):
                    body[name] = choices[pick % len(choices)]
            _fill_in_controls(body, is_json=case.media_type == "application/json")
            _fill_in_loras(body, is_json=case.media_type == "application/json")
            _fill_in_images(body, is_json=case.media_type == "application/json")
        for name, known in (
            ("job_id", self.job_ids),
            ("file_id", self.file_ids),
            ("digest", self.digests),
            ("model", MODELS),
            ("name", LORAS),
        ):
            if name in (case.path_parameters or {}) and known:
                case.path_parameters[name] = known[pick % len(known)]

    def wild(self, call: WildCall) -> WildReply:
        """Make a call that no schema knows; whatever is raised is raised here."""
        reply = self._run(made(self.app, call))
        if reply.headers.get("content-type") == "application/json":
            self._remember(reply.body.decode())
        return reply

    def _remember(self, text: str) -> None:
        self.job_ids += re.findall(r"job-[0-9a-f]{32}", text)
        self.file_ids += re.findall(r"img-[0-9a-f]{32}\.\w+", text)
        self.digests += re.findall(r"file-([0-9a-f]{64}-[0-9]+)", text)
        del self.job_ids[:-_MAX_KNOWN], self.file_ids[:-_MAX_KNOWN], self.digests[:-_MAX_KNOWN]

    def settle(self) -> None:
        """Wait until nothing is left to do; fail if something stays."""
        self._run(self._settle())

    async def _settle(self) -> None:
        jobs, dispatch = self.cell.jobs_service, self.cell.dispatch
        await until(lambda: not jobs.num_open and not self.cell.core.num_waiting)
        cluster = await dispatch.snapshot()
        assert (cluster.num_waiting, cluster.num_leased) == (0, 0)
        assert all(replica.num_leased == 0 for replica in cluster.replicas)
        totals = cluster.totals
        ends = ("completed", "error", "invalid", "aborted", "lost")
        assert totals["accepted"] == sum(totals.get(end, 0) for end in ends), totals


def _fill_in_images(body: dict[str, Any], *, is_json: bool) -> None:
    """Put images where something stands for one; without a mask, nothing that needs one."""
    for name, data in (("image", IMAGE), ("mask", MASK), ("file", IMAGE)):
        if name in body:
            body[name] = coded(data) if is_json else data
    if isinstance(body.get("images"), list) and "image" not in body:
        body["images"] = [{"image_url": coded(IMAGE)}]
    if isinstance(body.get("allow"), list) and not is_json:
        # as the schema's encoding says, which schemathesis does not follow
        body["allow"] = json.dumps(body["allow"])
    if "mask" not in body:
        for name in ("feather_px", "paste_back", "crop"):
            body.pop(name, None)


def _fill_in_loras(body: dict[str, Any], *, is_json: bool) -> None:
    """Name LoRAs that there are where something stands for their names."""
    if "source" in body and isinstance(body.get("name"), str):
        body["name"] = LORAS[len(body["name"]) % len(LORAS)]
    chosen = body.get("loras")
    if not isinstance(chosen, list):
        return
    for name, one in zip(LORAS[1:], chosen, strict=False):
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            one["name"] = name
    body.pop("fidelity", None)
    if not is_json:
        body["loras"] = json.dumps(chosen)


def _fill_in_controls(body: dict[str, Any], *, is_json: bool) -> None:
    """Name the ControlNet that there is, with an image, and a detector that there is."""
    chosen = body.get("controlnets")
    if not isinstance(chosen, list):
        return
    for one in chosen:
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            one |= {"name": "edges", "image": coded(MASK)}
            one["preprocess"] = "canny" if one.get("preprocess") else None
            one.pop("start", None)
    body.pop("fidelity", None)
    if not is_json:
        body["controlnets"] = json.dumps(chosen)


def _plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("method", "url", "headers", "params", "data", "json", "cookies", "files")
    return {name: kwargs[name] for name in names if name in kwargs}


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


@contextmanager
def fuzzed_service(folder: Path) -> Iterator[FuzzedService]:
    # in a thread of its own: replicas must poll while the next call is made up
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        service = FuzzedService(loop, folder)
        service.start()
        try:
            yield service
        finally:
            service.stop()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def own_bytes() -> int:
    """Bytes that are allocated by lines of ours and of the web framework."""
    kept = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("ray_cluster", "starlette")]
    snapshot = tracemalloc.take_snapshot().filter_traces(kept)
    return sum(one.size for one in snapshot.statistics("filename"))
