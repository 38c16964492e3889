"""One call is followed through gateway, dispatcher and replica by its id in their logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LogsConfig
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.observability.logs import set_up_logs
from tests.engine.staged import StagedModel
from tests.fakes import sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell
from tests.replica.setup import Link, new_worker, until

PROMPT = "an unusual tetrahedron"
BODY = {
    "prompt": PROMPT,
    "num_inference_steps": 3,
    "size": "32x32",
    "user": 'x"}\n{"event": "forged"}',
}
GENERATE = "/v1/images/generations"


class Log:
    """Everything that our logger has written."""

    def __init__(self) -> None:
        self.text = io.StringIO()

    def about(self, **fields: str) -> list[dict[str, Any]]:
        """The lines with these fields; every line that there is must be a JSON object."""
        lines = [json.loads(line) for line in self.text.getvalue().splitlines()]
        assert all(isinstance(line, dict) for line in lines)
        return [line for line in lines if all(line.get(k) == v for k, v in fields.items())]


@pytest.fixture
def log() -> Iterator[Log]:
    logger = logging.getLogger("ray_cluster")
    saved = list(logger.handlers), logger.level, logger.propagate
    log = Log()
    set_up_logs(LogsConfig(format="json"), [logging.StreamHandler(log.text)], process={})
    yield log
    logger.handlers[:], logger.level, logger.propagate = saved
    logger.setLevel(saved[1])


@asynccontextmanager
async def running(
    folder: Path, model: StagedModel, coder: ImageCoder
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over a dispatcher with one replica."""
    name = model.inner.profile.model
    config = ClusterConfig.model_validate({"pools": [{"name": name, "model": "x"}]})
    async with JobsCell(folder) as cell:
        link = Link(cell.dispatch)
        worker = new_worker(model, link, coder, "r1", results=cell.results)
        worker.start()
        app = create_app(cell, settings_for(config), results=cell.results, images=sent_images())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", timeout=60.0
        ) as http:
            await until(lambda: link.epochs)
            yield http
        await worker.drain()


async def test_a_call_is_followed_from_the_gateway_to_the_replica_and_back(
    tmp_path: Path, model: StagedModel, coder: ImageCoder, log: Log
) -> None:
    async with running(tmp_path, model, coder) as http:
        reply = await http.post(GENERATE, json=BODY, headers={"X-Request-ID": "call-17"})
        assert reply.status_code == 200
        await http.post(GENERATE, json=BODY)
        lost = await http.get("/v1/jobs/x%0A%7B%22event%22:%20%22forged%22%7D")
    assert lost.status_code == 404
    lines = log.about(request_id="call-17")
    assert [line["event"] for line in lines] == [
        "image_accepted",
        "image_leased",
        "work_started",
        "work_finished",
        "image_completed",
        "call_answered",
    ]
    assert len({line["image_id"] for line in lines[:-1]}) == 1
    assert [line["replica"] for line in lines[1:-1]] == ["r1"] * 4
    completed, answered = lines[-2:]
    stages = [completed[f"{stage}_s"] for stage in ("queue", "encode", "denoise", "decode")]
    assert all(seconds >= 0 for seconds in stages)
    assert completed["deadline_met"] is True
    assert sum(stages) <= completed["elapsed_s"] <= answered["elapsed_s"]
    assert (answered["route"], answered["status"]) == (GENERATE, 200)
    assert log.about(event="forged") == []
    assert PROMPT not in log.text.getvalue()
    assert "tetrahedron" not in log.text.getvalue()


async def test_a_job_is_followed_by_its_id_and_by_the_call_that_made_it(
    tmp_path: Path, model: StagedModel, coder: ImageCoder, log: Log
) -> None:
    async with running(tmp_path, model, coder) as http:
        reply = await http.post("/v1/jobs", json=BODY, headers={"X-Request-ID": "call-18"})
        job_id = reply.json()["id"]
        await until(lambda: log.about(event="job_ended"))
        await http.get(f"/v1/jobs/{job_id}")
    lines = log.about(job_id=job_id)
    events = [line["event"] for line in lines]
    assert sorted(events[:-1]) == sorted(
        [
            "image_accepted",
            "job_accepted",
            "call_answered",
            "image_leased",
            "work_started",
            "work_finished",
            "image_completed",
            "job_ended",
        ]
    )
    # a later call about the job has an id of its own
    assert {line["request_id"] for line in lines[:-1]} == {"call-18"}
    assert events[-1] == "call_answered"
    assert lines[-1]["request_id"] != "call-18"
    assert log.about(event="job_ended")[0]["state"] == "completed"


async def test_a_failed_image_is_told_by_replica_and_dispatcher_without_its_prompt(
    tmp_path: Path, model: StagedModel, coder: ImageCoder, log: Log
) -> None:
    def fail(_stage: str, _ids: Any) -> None:
        raise ValueError(f"cannot encode {PROMPT!r}")

    async with running(tmp_path, model, coder) as http:
        model.before.append(fail)
        reply = await http.post(GENERATE, json=BODY, headers={"X-Request-ID": "call-19"})
    assert reply.status_code == 500
    failed, ended = log.about(request_id="call-19", levelname="WARNING")[:2]
    assert (failed["event"], failed["stage"], failed["replica"]) == ("work_failed", "encode", "r1")
    assert (ended["event"], ended["kind"]) == ("image_failed", "error")
    assert "ValueError: cannot encode '[prompt]'" in failed["error"]
    assert "tetrahedron" not in log.text.getvalue()


async def test_what_the_coder_writes_names_the_image(
    tmp_path: Path, model: StagedModel, log: Log
) -> None:
    with ImageCoder() as coder:
        async with running(tmp_path, model, coder) as http:
            await http.post(GENERATE, json=BODY)
            for process_id in coder.process_ids:
                psutil.Process(process_id).kill()
            reply = await http.post(GENERATE, json=BODY, headers={"X-Request-ID": "call-20"})
    assert reply.status_code == 200
    [line] = log.about(logger="ray_cluster.imaging.processes.coder_pool")
    assert line["request_id"] == "call-20"
    assert line["image_id"] == log.about(event="work_finished")[-1]["image_id"]
