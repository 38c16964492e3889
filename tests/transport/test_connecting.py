"""Two sides find the cheapest link; whoever is not welcome is refused, and harms nobody."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from ray_cluster.transport import handshakes
from ray_cluster.transport.connecting import Listener, connect, listen
from ray_cluster.transport.links import Link, LinkClosed, LinkLimits, LinkRefused
from tests.transport.harness import PATIENCE_S, noise


class Service:
    """A listener, and the links that it has accepted."""

    def __init__(self, limits: LinkLimits, host: str = "127.0.0.1", **options: bool) -> None:
        self._found: queue.Queue[Link] = queue.Queue()
        self.listener: Listener = listen(host, self._found.put, limits, **options)

    def connect(self, secret: str | None = None, **options: bool) -> Link:
        return connect(self.listener.target, secret or self.listener.secret, **options)

    def raw(self) -> socket.socket:
        host, _, port = self.listener.target.rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE_S)

    def accepted(self) -> Link:
        return self._found.get(timeout=PATIENCE_S)

    def check(self, link: Link) -> None:
        """A message goes there and back."""
        there = self.accepted()
        link.send(b"question", [noise(1000)])
        there.send(b"answer", there.receive().frames)
        assert link.receive().frames[0].tobytes() == noise(1000).tobytes()
        for one in (link, there):
            one.close()

    def close(self) -> None:
        self.listener.close()
        assert self._found.empty(), "a link was accepted that should not be"


@pytest.fixture
def service() -> Iterator[Service]:
    with contextlib.closing(Service(LinkLimits(handshake_s=0.5))) as service:
        yield service


def test_on_one_node_memory_is_shared_and_tcp_where_either_side_does_not_want_it(
    service: Service,
) -> None:
    link = service.connect()
    assert link.kind == "shared-memory"
    service.check(link)
    link = service.connect(shares_memory=False)
    assert link.kind == "tcp"
    service.check(link)
    with contextlib.closing(Service(LinkLimits(), shares_memory=False)) as without:
        link = without.connect()
        assert link.kind == "tcp"
        without.check(link)


@pytest.mark.parametrize("step", ["_meet", "_met"])
def test_it_stays_tcp_where_the_unix_socket_is_out_of_reach(
    service: Service, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(*_arguments: object) -> None:
        return None

    monkeypatch.setattr(handshakes, step, out_of_reach)
    link = service.connect()
    assert link.kind == "tcp"
    service.check(link)


def test_an_address_of_version_6_works_too() -> None:
    with contextlib.closing(Service(LinkLimits(), "::1")) as service:
        service.check(service.connect())


def test_a_wrong_secret_is_refused_and_says_so(service: Service) -> None:
    with pytest.raises(LinkRefused, match="secret"):
        service.connect("wrong")
    service.check(service.connect())


def test_a_foreign_version_is_refused_on_both_sides(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.raw() as foreign:
        greeting = foreign.recv(1000)
        assert greeting[4:6] == struct.pack("!H", handshakes.VERSION)
        foreign.sendall(greeting[:4] + struct.pack("!H", 77) + bytes(100))
        assert _ends(foreign)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(LinkRefused, match="version 77"):
            _connect_to(other, greeting[:4] + struct.pack("!H", 77))
        with pytest.raises(LinkRefused, match="another protocol"):
            _connect_to(other, b"HTTP/1.1 400 Bad Request\r\n")
    service.check(service.connect())


def _connect_to(server: socket.socket, greeting: bytes) -> None:
    def greet() -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(ConnectionError):
            client.sendall(greeting)
            client.recv(1)

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        connect(f"127.0.0.1:{server.getsockname()[1]}", "secret")
    finally:
        thread.join()


def test_garbage_and_half_open_connections_are_closed_and_others_are_served(
    service: Service,
) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(service.raw()) for _ in range(5)]
        garbage = stack.enter_context(service.raw())
        garbage.sendall(noise(100).tobytes())
        service.check(service.connect())
        assert all(_ends(one) for one in (garbage, *silent))


def test_nobody_listens(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LinkRefused, match=f"no link to '127.0.0.1:{port}'"):
        connect(f"127.0.0.1:{port}", "secret")
    with pytest.raises(LinkRefused, match="no link to 'nonsense'"):
        connect("nonsense", "secret")


def test_what_is_no_message_closes_a_link_and_no_other(service: Service) -> None:
    good = service.connect()
    good_there = service.accepted()
    for after_header in (b"\xff" * 200, struct.pack("!4sII2Q", b"rclm", 0, 2, 2**62, 1)):
        bad = service.connect(shares_memory=False)
        there = service.accepted()
        # the socket itself, as no link sends such a thing
        bad._socket.sendall(after_header)  # type: ignore[attr-defined]
        with pytest.raises(LinkClosed, match=r"no message|at most"):
            there.receive()
        with pytest.raises(LinkClosed):
            bad.receive()
        bad.close()
    for packet in (b"\xff" * 200, struct.pack("=BQIIQQ", 1, 1, 5, 1, 0, 10), b"\x02"):
        bad = service.connect()
        there = service.accepted()
        bad._socket.send(packet)  # type: ignore[attr-defined]
        with pytest.raises(LinkClosed, match="no message"):
            there.receive()
        with pytest.raises(LinkClosed):
            bad.receive()
        bad.close()
    good.send(b"still there")
    assert good_there.receive().head == b"still there"
    good.close()
    good_there.close()


def _ends(connection: socket.socket) -> bool:
    """Whether the other side closes a connection."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        return True
    return True
