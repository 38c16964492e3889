"""Serve's scale endpoint, on a stand-in for Ray's dashboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ray_cluster.deployments.serve.serve_scaler import NotScaled, ServeScaler

APPLICATIONS = {
    "front": {"deployments": {"Gateway": {"target_num_replicas": 2}}},
    "sd": {"deployments": {"BaseModel": {"target_num_replicas": 3}}},
    "judge": {"deployments": {"Discriminator": {"target_num_replicas": 1}}},
}


class Dashboard(HTTPServer):
    """Answers as Ray's dashboard does, and notes what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[tuple[str, Any]] = []
        self.refuses = False
        self.body: bytes | None = None


class Answers(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self._answer(200, {"applications": APPLICATIONS})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body)))
        if self.server.refuses:
            self._answer(412, {"error": "external_scaler_enabled is false"})
        else:
            self._answer(200, {"message": "Scaling request received."})

    def _answer(self, status: int, body: Any) -> None:
        data = self.server.body or json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    server = Dashboard()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def scaler_of(dashboard: Dashboard) -> ServeScaler:
    return ServeScaler(lambda: f"127.0.0.1:{dashboard.server_port}")


def test_only_workers_are_seen(dashboard: Dashboard) -> None:
    assert scaler_of(dashboard).targets() == {"sd": 3, "judge": 1}


def test_an_application_is_scaled_by_its_deployment(dashboard: Dashboard) -> None:
    scaler = scaler_of(dashboard)
    scaler.targets()
    scaler.scale("judge", 2)
    path = "/api/v1/applications/judge/deployments/Discriminator/scale"
    assert dashboard.asked == [(path, {"target_num_replicas": 2})]


def test_what_serve_refuses_is_said(dashboard: Dashboard) -> None:
    scaler = scaler_of(dashboard)
    scaler.targets()
    dashboard.refuses = True
    with pytest.raises(NotScaled, match=r"412: .*external_scaler_enabled"):
        scaler.scale("sd", 4)
    with pytest.raises(NotScaled, match="no application front: deploy it"):
        scaler.scale("front", 4)


def test_an_answer_that_is_none_ends_no_loop(dashboard: Dashboard) -> None:
    dashboard.body = b"<html>"
    with pytest.raises(NotScaled, match="not as it should"):
        scaler_of(dashboard).targets()


def test_a_dashboard_that_is_away_is_waited_for() -> None:
    with pytest.raises(NotScaled, match=r"not started yet; .*scaling: policy does without"):
        ServeScaler(lambda: None).targets()
    with pytest.raises(NotScaled, match=r"refused.*scaling: policy does without"):
        ServeScaler(lambda: "127.0.0.1:9").targets()
