"""Serve's autoscaling policy of workers, and the place where it finds what is planned.

The controller writes how many replicas an application is to have into Ray's key-value store. The
policy runs in Serve's own controller, pickled by value: beyond Ray it needs nothing there. Ray's
dashboard has no part in it.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any

from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.serve.config import AutoscalingContext

# Serve's own, so that lines come into its controller's log
logger = logging.getLogger("ray.serve")

_NAMESPACE = b"ray_cluster"
_TIMEOUT_S = 10.0
_EVERY_S = 0.5
# after a try that failed
_RETRY_S = 5.0


@dataclass(frozen=True)
class PlannedCount:
    """How many replicas an application is to have.

    Attributes:
        mark: differs from one writing to the next.
    """

    num_replicas: int
    mark: str


def write_planned(application: str, num_replicas: int) -> None:
    """Write a count for the policy of an application; RayError if the store does not answer."""
    text = json.dumps(asdict(PlannedCount(num_replicas, uuid.uuid4().hex)))
    client = internal_kv_get_gcs_client()
    client.internal_kv_put(_key(application), text.encode(), True, _NAMESPACE, timeout=_TIMEOUT_S)


def read_planned(application: str) -> PlannedCount | None:
    """Return what was written last; None if nothing was.

    Raises:
        RayError: the store does not answer.
        ValueError: another version of this program wrote it.
    """
    client = internal_kv_get_gcs_client()
    found = client.internal_kv_get(_key(application), _NAMESPACE, timeout=_TIMEOUT_S)
    if found is None:
        return None
    try:
        row = json.loads(found)
        return PlannedCount(int(row["num_replicas"]), str(row["mark"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"no planned count: {found!r}") from error


def _key(application: str) -> bytes:
    return f"replicas/{application}".encode()


def _in_thread(act: Callable[[], None]) -> None:
    Thread(target=act, name="plan-scaling", daemon=True).start()


class PlanScaling:
    """Keeps as many replicas as were planned since the deployment was made or changed.

    Before the first such plan, the deployment keeps what it has: an old plan, such as of a service
    that ran earlier, counts no more. While nobody plans, and while the store is silent, the last
    plan stays in force. It neither raises nor waits, because both would hold up all of Serve: it
    reads in a thread.

    Args:
        read: returns what was written last for an application.
        start: runs something beside the caller.
    """

    def __init__(
        self,
        read: Callable[[str], PlannedCount | None] = read_planned,
        start: Callable[[Callable[[], None]], None] = _in_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._start = start
        self._clock = clock
        self._due_s = clock()
        self._is_reading = False
        # what was written before this deployment, once that is known
        self._has_begun = False
        self._old: PlannedCount | None = None
        self._num_replicas: int | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the replicas to keep, and no state; Serve calls it several times a second."""
        application = context.app_name or ""
        if not self._is_reading and self._clock() >= self._due_s:
            self._is_reading = True
            try:
                self._start(lambda: self._refresh(application))
            # as Python raises where no thread can be started
            except RuntimeError as error:
                self._end_reading(_RETRY_S)
                logger.warning("the plan of %s is not read: %s", application, error)
        planned = self._num_replicas
        return context.target_num_replicas if planned is None else planned, {}

    def _refresh(self, application: str) -> None:
        wait_s = _RETRY_S
        try:
            self._note(self._read(application))
            wait_s = _EVERY_S
        except (RayError, ValueError) as error:
            logger.warning("the plan of %s is not read: %s", application, error)
        finally:
            self._end_reading(wait_s)

    def _note(self, found: PlannedCount | None) -> None:
        if not self._has_begun:
            self._has_begun, self._old = True, found
        elif found is not None and found != self._old:
            self._num_replicas = found.num_replicas

    def _end_reading(self, wait_s: float) -> None:
        self._due_s = self._clock() + wait_s
        self._is_reading = False
