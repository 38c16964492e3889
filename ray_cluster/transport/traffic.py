"""Counts what a link carries."""

from __future__ import annotations

import threading

from ray_cluster.transport.links import Traffic


class Meter:
    """The traffic of one end of a link; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_sent = self._sent_bytes = self._num_received = self._received_bytes = 0
        self._send_s = 0.0

    def sent(self, num_bytes: int, send_s: float) -> None:
        """Count a message that was sent, its head included."""
        with self._lock:
            self._num_sent += 1
            self._sent_bytes += num_bytes
            self._send_s += send_s

    def received(self, num_bytes: int) -> None:
        """Count a message that has come, its head included."""
        with self._lock:
            self._num_received += 1
            self._received_bytes += num_bytes

    @property
    def traffic(self) -> Traffic:
        """What was counted so far."""
        with self._lock:
            return Traffic(
                self._num_sent,
                self._sent_bytes,
                self._num_received,
                self._received_bytes,
                self._send_s,
            )
