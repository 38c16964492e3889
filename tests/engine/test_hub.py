"""Models of the hub: what is downloaded, from a server on this machine that answers as the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from diffusers import DiffusionPipeline

from ray_cluster.engine.models.whole_models import load_models
from tests.engine.conftest import Zoo

REVISION = "a" * 40
RESOLVE = "import sys, ray_cluster.engine.files.folders as f; print(f.resolve_folder(sys.argv[1]))"


class Hub(BaseHTTPRequestHandler):
    """The calls by which huggingface_hub lists and fetches the files of a repository."""

    root: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        files = sorted(one for one in self.root.rglob("*") if one.is_file())
        names = {one.relative_to(self.root).as_posix(): one for one in files}
        if path.startswith("/api/models/me/tiny/tree"):
            self._send(json.dumps([self._entry(name, one) for name, one in names.items()]).encode())
        elif path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": name} for name in names]
            content = {"id": "me/tiny", "sha": REVISION, "siblings": siblings}
            self._send(json.dumps(content).encode())
        elif (name := path.partition("/resolve/")[2].partition("/")[2]) in names:
            self._send(names[name].read_bytes())
        else:
            self.send_error(404)

    def _entry(self, name: str, path: Path) -> dict[str, object]:
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": REVISION}

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of the repository me/tiny, and the hub's address."""
    root = tmp_path / "repository"
    handler = type("OfFolder", (Hub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


# where the cache has it already: tests/cli/test_doctor.py
@pytest.mark.slow
def test_of_a_repository_the_variant_is_downloaded_where_there_is_nothing_else(
    zoo: Zoo, tmp_path: Path, hub: tuple[Path, str]
) -> None:
    root, endpoint = hub
    pipeline = DiffusionPipeline.from_pretrained(zoo.folder("sdxl"))
    pipeline.save_pretrained(root, variant="fp16", max_shard_size="60KB")
    # one component has both, of which the plain one is downloaded
    pipeline.vae.save_pretrained(root / "vae")
    environment = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    found = subprocess.run(
        [sys.executable, "-c", RESOLVE, "me/tiny"],
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.split()[-1])
    assert not list((folder / "vae").glob("*fp16*"))
    for name, model in load_models(folder, torch.float32).items():
        wanted = getattr(pipeline, name).state_dict()
        assert all(torch.equal(wanted[key], one) for key, one in model.state_dict().items()), name
