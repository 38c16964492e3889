"""A real nginx with the directives that the chart's Ingress stands for, before a real service."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.cell.local_service import LocalService, running_locally
from tests.cell.test_loras import until
from tests.e2e.jobs import create, scrape
from tests.e2e.service import HEADERS, LIGHT_POOL, free_ports, image_request, post
from tests.helm.chart import RELEASE, render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PREFIX = "nginx.ingress.kubernetes.io/"
# what ingress-nginx takes where there is no annotation
DEFAULTS = {
    "proxy-body-size": "1m",
    "proxy-request-buffering": "on",
    "proxy-buffering": "off",
    "proxy-read-timeout": "60",
}
# a minute, in the tests
MINUTE_S = 1.0
MAX_UPLOAD_BYTES = 24 << 20
MOST_STEPS = 1000
CONFIG = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log; {user}
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {upstream}; proxy_http_version 1.1;
      proxy_set_header Host $http_host; proxy_set_header Connection "";
      client_max_body_size {proxy-body-size};
      proxy_request_buffering {proxy-request-buffering};
      proxy_buffering {proxy-buffering};
      proxy_read_timeout {timeout_ms}ms;
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed (Debian's package nginx-light)")
    more: dict[str, Any] = {"cascades": [], "discriminators": [], "loras": {"num_stores": 0}}
    pool = LIGHT_POOL | {"max_num_inference_steps": MOST_STEPS}
    limits = dict.fromkeys(("max_upload_bytes", "max_input_bytes"), MAX_UPLOAD_BYTES)
    folder = tmp_path_factory.mktemp("behind-nginx")
    with running_locally(folder, pools=[pool], limits=limits, **more) as one:
        yield one


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def nginx(folder: Path, upstream: str, annotations: Mapping[str, str]) -> Iterator[str]:
    """The URL of an nginx that runs within the block."""
    [port] = free_ports(1)
    given = DEFAULTS | annotations
    timeout_ms = round(1000 * MINUTE_S / 60 * float(given.pop("proxy-read-timeout")))
    user = "user root;" if Path("/").owner() == Path.home().owner() else ""
    folder.mkdir()
    text = CONFIG.format(
        folder=folder, port=port, upstream=upstream, timeout_ms=timeout_ms, user=user, **given
    )
    (folder / "nginx.conf").write_text(text)
    log = folder / "error.log"
    server = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf", "-e", log])
    try:
        until(lambda: is_open(port), "nginx")
        assert server.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def num_steps(service: LocalService) -> int:
    """How many steps take two or three minutes of the tests."""
    post(service, num_inference_steps=50)
    begun_s = time.monotonic()
    assert post(service, num_inference_steps=50, slo_s=600).status_code == 200
    return min(MOST_STEPS, round(50 * 2.5 * MINUTE_S / (time.monotonic() - begun_s)))


@pytest.fixture(scope="module")
def ours(service: LocalService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service behind an Ingress of the chart."""
    ingress = render({"ingress": {"enabled": True, "host": "images.example.com"}})[
        "Ingress", RELEASE
    ]
    given = ingress["metadata"]["annotations"]
    assert all(name.startswith(PREFIX) for name in given)
    annotations = {name.removeprefix(PREFIX): value for name, value in given.items()}
    assert annotations.keys() <= DEFAULTS.keys()
    with nginx(tmp_path_factory.mktemp("nginx") / "ours", service.url, annotations) as url:
        yield url


@pytest.fixture(scope="module")
def plain(service: LocalService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service behind an Ingress without annotations."""
    with nginx(tmp_path_factory.mktemp("nginx") / "plain", service.url, {}) as url:
        yield url


def photo(side_px: int) -> bytes:
    pixels = np.random.default_rng(side_px).integers(0, 256, (side_px, side_px, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG", compress_level=0)
    return data.getvalue()


def edit(url: str, image: bytes, headers: Mapping[str, str] = HEADERS) -> httpx.Response:
    files = {"image": ("photo.png", image, "image/png")}
    fields = image_request(size="64x64")
    return httpx.post(
        f"{url}/v1/images/edits", files=files, data=fields, headers=headers, timeout=60
    )


def test_uploads_are_bounded_by_the_service_alone(ours: str, plain: str) -> None:
    large = photo(2000)
    assert 10 << 20 < len(large) < MAX_UPLOAD_BYTES
    reply = edit(ours, large)
    assert reply.status_code == 200, reply.text
    # nginx takes a megabyte, and refuses in its own words
    refused = edit(plain, large)
    assert (refused.status_code, refused.headers["content-type"]) == (413, "text/html")
    too_large = large + bytes(2 * MAX_UPLOAD_BYTES)
    refused = edit(ours, too_large)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "body_too_large"
    assert edit(ours, too_large, {}).json()["error"]["code"] == "invalid_api_key"


def slow_call(url: str, num_steps: int) -> httpx.Response:
    fields = image_request(num_inference_steps=num_steps, slo_s=600)
    return httpx.post(f"{url}/v1/images/generations", json=fields, headers=HEADERS, timeout=60)


def test_a_call_of_more_than_a_minute_is_answered(ours: str, plain: str, num_steps: int) -> None:
    assert slow_call(plain, num_steps).status_code == 504
    begun_s = time.monotonic()
    reply = slow_call(ours, num_steps)
    assert time.monotonic() - begun_s > MINUTE_S
    assert reply.status_code == 200, reply.text


def test_events_come_as_they_are_made(service: LocalService, ours: str, num_steps: int) -> None:
    job = f"/v1/jobs/{create(service, 3, num_inference_steps=num_steps)}"
    states = []
    with httpx.stream("GET", f"{ours}{job}/events", headers=HEADERS, timeout=60) as events:
        for line in events.iter_lines():
            if line.startswith("event: "):
                state = httpx.get(f"{service.url}{job}", headers=HEADERS).json()["state"]
                states.append((line.removeprefix("event: "), state))
    assert states[0][1] in {"queued", "running"}
    assert states[-1] == ("completed", "completed")


def test_a_client_that_goes_away_frees_what_it_asked_for(
    service: LocalService, ours: str, num_steps: int
) -> None:
    def num_aborted() -> int:
        return scrape(service).total("images_total", event="aborted")

    def num_leased() -> int:
        return scrape(service).total("leased_images")

    before = num_aborted()
    body = json.dumps(image_request(num_inference_steps=num_steps, slo_s=600))
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    with socket.create_connection(("127.0.0.1", int(ours.rpartition(":")[2]))) as client:
        client.sendall(
            f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n{head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        until(num_leased, "the call to begin")
        assert num_aborted() == before
    until(lambda: num_aborted() > before, "the call to end")
