"""Listens for links and connects them; which back end they get, both sides find out."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

from ray_cluster.transport.arena import can_share_memory
from ray_cluster.transport.handshakes import Timed, answer, ask, closed_on_error
from ray_cluster.transport.links import Link, LinkLimits, LinkRefused

logger = logging.getLogger(__name__)

# of clients that have connected and not agreed on a link yet
_MAX_UNDECIDED = 64
# how often it is seen that the listener is closed
_WAKE_S = 0.25
_PAUSE_S = 0.1


class Listener:
    """Accepts links on a port of its own, each in a short-lived thread.

    Attributes:
        target: ``host:port``, for :func:`connect`.
        secret: for those who may; it is new with every listener.
    """

    def __init__(
        self,
        server: socket.socket,
        on_link: Callable[[Link], None],
        limits: LinkLimits,
        *,
        offers_memory: bool,
    ) -> None:
        host, port = server.getsockname()[:2]
        self.target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.secret = secrets.token_urlsafe(32)
        self._server = server
        self._on_link = on_link
        self._limits = limits
        self._offers_memory = offers_memory
        self._undecided = threading.BoundedSemaphore(_MAX_UNDECIDED)
        self._is_closed = threading.Event()
        self._server.settimeout(_WAKE_S)
        self._thread = threading.Thread(target=self._accept, name="links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more links; those that are there stay."""
        self._is_closed.set()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.closing(self._server):
            while not self._is_closed.is_set():
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    # a client that has left already, or too many open files
                    logger.warning("a link was not accepted: %s", error)
                    time.sleep(_PAUSE_S)
                    continue
                if not self._undecided.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(
                    target=self._agree, args=(connection,), name="new-link", daemon=True
                ).start()

    def _agree(self, connection: socket.socket) -> None:
        timed = Timed(connection, time.monotonic() + self._limits.handshake_s)
        try:
            with closed_on_error(connection):
                link = answer(timed, self.secret, self._limits, offers_memory=self._offers_memory)
        except (LinkRefused, OSError) as error:
            logger.info("a link was refused: %s", error)
            return
        finally:
            self._undecided.release()
        if self._is_closed.is_set():
            link.close()
        else:
            self._on_link(link)


def listen(
    host: str,
    on_link: Callable[[Link], None],
    limits: LinkLimits | None = None,
    *,
    shares_memory: bool = True,
) -> Listener:
    """Listen for links on a free port of an address of this machine.

    Args:
        on_link: called with each link, in a thread of its own; closes it in the end.
        shares_memory: whether clients on this node may get links through shared memory.

    Raises:
        OSError: the address is not this machine's.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    server = socket.create_server((host, 0), family=family, backlog=128)
    offers_memory = shares_memory and can_share_memory()
    return Listener(server, on_link, limits or LinkLimits(), offers_memory=offers_memory)


def connect(
    target: str,
    secret: str,
    timeout_s: float = 5.0,
    limits: LinkLimits | None = None,
    *,
    shares_memory: bool = True,
) -> Link:
    """Return a link to a listener: through shared memory on the same node, else over TCP.

    Args:
        target: ``host:port``, as the listener says it.
        timeout_s: for all of it.
        shares_memory: False keeps to TCP.

    Raises:
        LinkRefused: there is none; the message says why, and what to do.
    """
    host, _, port = target.rpartition(":")
    timed_until_s = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        with closed_on_error(connection):
            accepts_memory = shares_memory and can_share_memory()
            timed = Timed(connection, timed_until_s)
            return ask(timed, secret, limits or LinkLimits(), accepts_memory=accepts_memory)
    except (LinkRefused, OSError, ValueError) as error:
        raise LinkRefused(f"no link to {target!r}: {error}") from error
