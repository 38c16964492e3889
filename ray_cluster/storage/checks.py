"""Whether the stores of a service can be written, when it starts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from ray_cluster.storage.blob_store import BlobStoreError, StoreRefuses

logger = logging.getLogger(__name__)

# for all stores together: a start waits for no store that is silent
_PATIENCE_S = 5.0


class Checked(Protocol):
    """A store."""

    def check(self) -> None: ...


def refuse_unusable(stores: Sequence[Checked]) -> None:
    """Check stores, at the same time; warn of those that fail just now. Blocks.

    Raises:
        StoreRefuses: one is missing, or closed to this process.
    """
    errors: list[BlobStoreError] = []

    def check(store: Checked) -> None:
        try:
            store.check()
        except BlobStoreError as error:
            errors.append(error)

    # a process that ends waits for none of them
    threads = [threading.Thread(target=check, args=(one,), daemon=True) for one in stores]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    for error in tuple(errors):
        if isinstance(error, StoreRefuses):
            raise error
        logger.warning("%s; the service starts without it", error)
    if any(thread.is_alive() for thread in threads):
        logger.warning(
            "a store of images, states or inputs does not answer within %.0f s; the service starts "
            "without it",
            _PATIENCE_S,
        )
