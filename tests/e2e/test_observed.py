"""What the running service tells of itself: its log files."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.e2e.service import HEADERS, Service, image_request

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def generate(service: Service, request_id: str) -> None:
    reply = httpx.post(
        f"{service.url}/v1/images/generations",
        json=image_request(num_inference_steps=4),
        headers=HEADERS | {"X-Request-ID": request_id},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"] == request_id


def test_a_call_is_followed_through_the_log_files_of_three_processes(service: Service) -> None:
    generate(service, "call-of-the-log-test")
    files = service.serve_logs()
    # each line of each file, Serve's own proxies and controller included
    lines = {name: [json.loads(line) for line in found] for name, found in files.items()}
    told = {
        (line["deployment"], line["event"])
        for found in lines.values()
        for line in found
        if line.get("request_id") == "call-of-the-log-test" and "event" in line
    }
    assert told == {
        ("Gateway", "call_answered"),
        ("Dispatcher", "image_accepted"),
        ("Dispatcher", "image_leased"),
        ("Dispatcher", "image_completed"),
        ("BaseModel", "work_started"),
        ("BaseModel", "work_finished"),
    }
    assert not any("red circle" in line for found in files.values() for line in found)
    # the terminal hears nothing of it
    assert "image_" not in service.log.read_text()
