"""A job store of each kind: SQLite in a file, and a real PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest

from ray_cluster.jobs.store.sql_store import SqlJobStore

_USER = "postgres"
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running server and how to make databases in it."""

    port: int

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Make an empty database; return its URL."""
        with psycopg.connect(self.url(_USER), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.url(database)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: 'apt-get install postgresql' gets it")
    # PostgreSQL refuses to run as root, and pytest's folders are closed to others
    user = _USER if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        folder, port = Path(name), _free_port()
        if user is not None:
            shutil.chown(folder, user, user)
        start = partial(subprocess.Popen, cwd=folder, user=user, group=user, extra_groups=[])
        if user is None:
            start = partial(subprocess.Popen, cwd=folder)
        data = str(folder / "data")
        made = start([programs / "initdb", "-D", data, "-U", _USER, "-A", "trust", "--no-sync"])
        assert made.wait(60) == 0
        server = start(
            [
                *(programs / "postgres", "-D", data, "-p", str(port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"),
                # nothing here outlives the machine
                *("-c", "fsync=off", "-c", "full_page_writes=off"),
            ],
        )
        try:
            running = PostgresServer(port)
            _wait(running, server)
            yield running
        finally:
            # at once, whoever is still connected
            server.send_signal(signal.SIGINT)
            server.wait(30)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/jobs.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create(f"jobs_{time.monotonic_ns()}")


@pytest.fixture
def store(store_url: str) -> Iterator[SqlJobStore]:
    opened = SqlJobStore.open(store_url)
    yield opened
    opened.close()


def _programs() -> Path | None:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name))
    return versions[-1] if versions else None


def _wait(server: PostgresServer, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            psycopg.connect(server.url(_USER)).close()
        except psycopg.OperationalError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.1)
        else:
            return


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
