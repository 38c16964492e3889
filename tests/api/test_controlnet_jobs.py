"""ControlNets in jobs, under keys, and in cascades."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.api.app import create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.storage.inputs import OPEN_OWNER, input_name
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import http_of
from tests.api.controlnet_calls import RED, SKETCH, controls_config, entry
from tests.api.edit_calls import EDITS, IMAGE, JOBS, coded, parts, picture
from tests.api.test_cascades import profiles
from tests.api.test_jobs import ended
from tests.fakes import FakeDispatcherClient, PlainChecks, memory_results, sent_images, settings_for
from tests.jobs.jobs_cell import JobsCell, Replica


@pytest.fixture
async def calls(cell: JobsCell, replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway over the cell with the replica, and the cell's own inputs."""
    cell.add_controlnets("edges", "layout")
    app = create_app(
        cell,  # type: ignore[arg-type]
        settings_for(controls_config()),
        results=cell.results,
        images=SentImages(cell.inputs, PlainChecks()),
    )
    async with http_of(app) as http:
        yield http


async def test_a_job_is_made_with_its_controlnets_and_keeps_their_maps(
    calls: httpx.AsyncClient, cell: JobsCell, replica: Replica
) -> None:
    chosen = [entry(preprocess="canny", scale=0.5, end=0.6)]
    reply = await calls.post(JOBS, json={**RED, "controlnets": chosen})
    assert reply.status_code == 202, reply.text
    job = reply.json()
    said = {"name": "edges", "scale": 0.5, "start": 0.0, "end": 0.6, "preprocess": "canny"}
    assert job["controlnets"] == [said]
    [lease] = (await replica.poll()).values()
    [use] = lease.request.add_ons.controls
    # a sweep spares the map while the job is open
    assert use.image in lease.request.inputs
    assert cell.inputs.get(OPEN_OWNER, use.image) is not None
    assert input_name(lease.request.owner, use.image) == f"{OPEN_OWNER}.{use.image.sha256}"
    await replica.finish(lease, b"an image")
    done = await ended(calls, job["id"])
    assert (done["state"], done["controlnets"]) == ("completed", [said])


async def test_a_key_tells_other_images_and_values_of_controlnets_apart(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    async def post(key: str, path: str = JOBS, **changes: Any) -> httpx.Response:
        body = {**RED, "controlnets": [entry(**changes)]}
        return await calls.post(path, json=body, headers={"Idempotency-Key": key})

    first = await post("a", scale=0.5)
    assert first.status_code == 202, first.text
    assert (await post("a", scale=0.5)).json()["id"] == first.json()["id"]
    for other in ({"scale": 0.6}, {"scale": 0.5, "image": picture(32, 32)}):
        check_error(await post("a", **other), 422, code="idempotency_key_reused")
    # a form and JSON of an edit with the same images are the same call
    control = {"name": "edges", "image": "@sketch"}
    files = parts({"image": IMAGE, "sketch": SKETCH}, {**RED, "controlnets": [control]})
    form = await calls.post(JOBS, files=files, headers={"Idempotency-Key": "b"})
    assert form.status_code == 202, form.text
    body = {**RED, "image": coded(IMAGE), "controlnets": [entry()]}
    as_json = await calls.post(JOBS, json=body, headers={"Idempotency-Key": "b"})
    assert (as_json.status_code, as_json.json()["id"]) == (200, form.json()["id"])
    body["controlnets"] = [entry("layout")]
    other = await calls.post(JOBS, json=body, headers={"Idempotency-Key": "b"})
    check_error(other, 422, code="idempotency_key_reused")


Asked = Callable[..., Any]


@pytest.fixture
def cascade(tmp_path: Path) -> tuple[FakeDispatcherClient, httpx.AsyncClient]:
    pools = [{"name": name, "model": "shapes-sd"} for name in ("heavy", "light")]
    parts_of = {"light": "light", "heavy": "heavy", "discriminator": "judge"}
    config = ClusterConfig.model_validate(
        {
            "pools": pools,
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [{"name": "auto", **parts_of, "threshold": 0.5}],
            "controlnets": [
                {"name": "edges", "model": "shapes-sd-edges", "bases": ["heavy"]},
                {"name": "quick", "model": "some/quick", "bases": ["light"]},
            ],
        }
    )
    fake = FakeDispatcherClient(*profiles())
    app = create_app(
        fake, settings_for(config), results=memory_results(), images=sent_images(str(tmp_path))
    )
    transport = httpx.ASGITransport(app)
    return fake, httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def test_a_cascade_with_controlnets_is_its_heavy_model_alone(
    cascade: tuple[FakeDispatcherClient, httpx.AsyncClient],
) -> None:
    fake, http = cascade
    body = {**RED, "model": "auto", "controlnets": [entry()]}
    edit = {**body, "image": coded(IMAGE)}
    for path, sent in ((URL, body), (EDITS, edit)):
        reply = await http.post(path, json=sent)
        assert reply.status_code == 200, reply.text
        [request] = fake.offered[-1]
        use = request.cascade
        assert use is not None
        assert (request.model, use.light, use.entry, use.reason) == (
            "heavy",
            None,
            "heavy",
            "add_ons",
        )
        assert [one.name for one in request.add_ons.controls] == ["edges"]
    # the base is the heavy model; that of the light one, where quality chooses it
    wrong = {**body, "controlnets": [entry("quick")]}
    reply = await http.post(URL, json=wrong)
    check_error(reply, 400, code="controlnet_of_another_model", param="controlnets[0].name")
    assert "made by heavy" in error_of(reply)["message"]
    assert (await http.post(URL, json={**wrong, "quality": "low"})).status_code == 200
    check_error(await http.post(URL, json={**body, "quality": "low"}), 400)
