"""The states of a replica's requests, in a store that outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ray_cluster.engine.step.state import RequestState
from ray_cluster.observability.logs import bound, fields_of, without_prompts
from ray_cluster.replica.states.writer import STORE_ERRORS, Blobs, StateWriter
from ray_cluster.replica.unexpected import unexpected
from ray_cluster.requests import ImageRequest, state_name
from ray_cluster.storage.state_format import header_of

logger = logging.getLogger(__name__)

_NUM_LOADS = 4


class StateTransfer:
    """Loads states of other replicas, stores this one's, and deletes those that are useless.

    Args:
        store: it may be slow, hang, fail or lose entries: that only costs steps.
        model_digest: of the replica's model; states of another one are not resumed.
        max_load_s: longest wait for a state before the request starts over.
        max_keep_s: longest wait for all states when the replica leaves.

    Attributes:
        writer: for the runner's checkpoints.
    """

    def __init__(
        self,
        store: Blobs,
        *,
        model_digest: str = "",
        max_load_s: float = 10.0,
        max_keep_s: float = 4.0,
    ) -> None:
        self._store = store
        self._model_digest = model_digest
        self._max_load_s = max_load_s
        self._max_keep_s = max_keep_s
        # threads of its own: a store that hangs must not hold up deliveries
        self._threads = ThreadPoolExecutor(_NUM_LOADS, thread_name_prefix="state-load")
        self.writer = StateWriter(store, model_digest=model_digest)

    def start(self) -> None:
        """Start the writer's thread."""
        self.writer.start()

    def stop(self) -> None:
        """End the threads; blocks a little."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.writer.stop()

    async def load(self, request: ImageRequest, device: torch.device) -> RequestState | None:
        """Return the state to resume, if there is one and it can be read."""
        self.writer.expect(request.request_id)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._max_load_s):
                state = await loop.run_in_executor(self._threads, self._read, request, device)
        except TimeoutError:
            why = f"no answer from the state store within {self._max_load_s} s"
        except STORE_ERRORS as error:
            why = without_prompts(str(error), request)
        # no state is worth an image, nor the lease that a task would hold that died of it
        except Exception as error:  # noqa: BLE001
            why = unexpected(error, request).message
        else:
            return state
        with bound(**fields_of(request)):
            logger.warning("the image starts over: %s", why)
        return None

    def _read(self, request: ImageRequest, device: torch.device) -> RequestState | None:
        data = self._store.get(state_name(request.request_id))
        if data is None:
            return None
        if header_of(data).model_digest != self._model_digest:
            raise ValueError("the state was made with other files of the model")
        # its instants become those of the submission
        state = RequestState.from_bytes(data, device=device, arrival_s=0.0, deadline_s=0.0)
        if state.request != request:
            raise ValueError(f"the state is of another request, {state.request.request_id}")
        return state

    async def keep_all(
        self, states: Sequence[RequestState], is_wanted: Callable[[str], bool]
    ) -> dict[str, int]:
        """Store states for others; return the steps of those that are in the store, by id.

        Args:
            is_wanted: called, in another thread, right before a request's state is written.
        """
        return await asyncio.to_thread(self.writer.keep_all, states, is_wanted, self._max_keep_s)

    def forget(self, request_id: str, *, is_ended: bool) -> None:
        """Stop writing states of a request; delete the stored one if the request has ended."""
        self.writer.forget(request_id, is_ended=is_ended)
