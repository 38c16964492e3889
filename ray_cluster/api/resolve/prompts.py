"""Refuses prompts with too many tokens before anything is made or answered.

Otherwise the replica would find out: too late for the status of a stream, and for the creation of a
job.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from dataclasses import dataclass

from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.models.prompt_tokens import PromptCounter, digest_of
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.requests import ModelProfile

logger = logging.getLogger(__name__)

# more takes long enough to be felt by other calls
_CHARS_ON_LOOP = 500


@dataclass(frozen=True, slots=True)
class _Counting:
    """A model's counter, and what it counts with."""

    digest: str
    counter: PromptCounter


class PromptCheck:
    """Counts tokens with the tokenizers that replicas have registered; fetches each set once."""

    def __init__(self, client: DispatcherClient) -> None:
        self._client = client
        self._counting: dict[str, _Counting] = {}
        self._fetching: dict[str, asyncio.Task[_Counting]] = {}

    async def check(self, fields: ImageGenerationRequest, profile: ModelProfile) -> None:
        """Check the prompts of a call.

        Raises:
            InvalidRequest: as the replica would: the first prompt that is too long.
            DispatcherUnavailable: the tokenizers are not here yet, and nobody has them.
        """
        if not profile.prompt_digest:
            return
        counting = self._counting.get(profile.model)
        if counting is None or counting.digest != profile.prompt_digest:
            counting = await asyncio.shield(self._fetch(profile.model))
        for param in ("prompt", "negative_prompt"):
            text = getattr(fields, param) or ""
            if len(text) > _CHARS_ON_LOOP:
                await asyncio.to_thread(counting.counter.check, text, param)
            else:
                counting.counter.check(text, param)

    def _fetch(self, model: str) -> asyncio.Task[_Counting]:
        """Return the one task that fetches a model's tokenizers."""
        if model not in self._fetching:
            # in a context of its own: Serve cancels what a cancelled request has called, by context
            task = asyncio.create_task(self._fetched(model), context=Context())
            self._fetching[model] = task
            task.add_done_callback(lambda done: self._end(model, done))
        return self._fetching[model]

    def _end(self, model: str, done: asyncio.Task[_Counting]) -> None:
        del self._fetching[model]
        if not done.cancelled() and (error := done.exception()) is not None:
            # whoever waited for it may be gone
            logger.debug("the tokenizers of %s are asked for again: %s", model, error)

    async def _fetched(self, model: str) -> _Counting:
        tokenizers = await self._client.prompt_tokenizers(model)
        counter = await asyncio.to_thread(PromptCounter, tokenizers)
        self._counting[model] = _Counting(digest_of(tokenizers), counter)
        return self._counting[model]
