"""A gateway's settings: they come from the dispatcher, and change while it runs."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress

from pydantic import ValidationError

from ray_cluster.api.errors import unavailable
from ray_cluster.config.loading import Document
from ray_cluster.config.sections.keys import ApiKey
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import parsed
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import CellCalls
from ray_cluster.protocol.settings import GatewaySettings

logger = logging.getLogger(__name__)

_HOLD_S = 10.0
_RETRY_S = 0.3
# calls that wait for settings
_MOST_WAITING = 1000
# a gateway that starts waits for its first settings before it takes calls, but not for ever
_FIRST_S = 20.0


class CurrentSettings:
    """The settings that calls are checked with. Before the first have come, nothing is served.

    Args:
        first: None for a gateway that waits for them.

    Attributes:
        latest: the settings; the defaults before there are any, which bound a call's head.
        pool_by_model: of several pools of a model the first; that of the default model first.
    """

    def __init__(self, first: GatewaySettings | None = None) -> None:
        self._settings: GatewaySettings | None = None
        self.latest = Document()
        self.pool_by_model: Mapping[str, PoolConfig] = {}
        self._first_models: tuple[str, ...] | None = None
        self.removed_models: frozenset[str] = frozenset()
        self.are_here = asyncio.Event()
        self._num_waiting = 0
        if first is not None:
            self.put(first)

    def put(self, settings: GatewaySettings) -> None:
        """Replace the settings; calls that were checked before go on unchanged."""
        document = parsed(Document, settings.document)
        self._settings, self.latest = settings, document
        earlier, found = self.pool_by_model, dict[str, PoolConfig]()
        for pool in document.pools:
            found.setdefault(pool.model_name, pool)
        self.pool_by_model = found
        self.removed_models = (self.removed_models | earlier.keys()) - found.keys()
        if self._first_models is None:
            self._first_models = tuple(found)
        self.are_here.set()

    @property
    def version(self) -> str:
        """Of the settings; empty before there are any."""
        return "" if self._settings is None else self._settings.version

    @property
    def is_open(self) -> bool:
        """Whether anybody may call; False before there are settings."""
        return self._settings is not None and not self._settings.api_keys

    async def first(self) -> None:
        """Wait for the first settings, for a while; an earlier Ray cluster may still serve.

        So many calls wait at most; others go on, and are refused.
        """
        if self._settings is None and self._num_waiting < _MOST_WAITING:
            self._num_waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FIRST_S):
                        await self.are_here.wait()
            finally:
                self._num_waiting -= 1

    def api_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys of those who may call; none where anybody may.

        Raises:
            ApiError: see :meth:`document`.
        """
        return self._given().api_keys

    def document(self) -> Document:
        """Return the settings.

        Raises:
            ApiError: 503, they have not come yet: who may call, and for what, is not known.
        """
        self._given()
        return self.latest

    def _given(self) -> GatewaySettings:
        if self._settings is None:
            raise unavailable(
                "This gateway has just started and does not know its settings yet; try again.",
                "starting",
            )
        return self._settings

    @property
    def needed_models(self) -> list[str]:
        """Those that were there when this gateway started: without them it is not ready."""
        return [name for name in self._first_models or () if name in self.pool_by_model]

    @property
    def max_num_inference_steps(self) -> int | None:
        """Of any model; None before there are settings."""
        return max((one.max_num_inference_steps for one in self.latest.pools), default=None)


class SettingsFeed:
    """Holds one long poll for settings open; without a dispatcher the last ones stay."""

    def __init__(self, client: CellCalls, current: CurrentSettings) -> None:
        self._client = client
        self._current = current
        self._process_id = f"gateway-{secrets.token_hex(8)}"
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin on the running loop, and wait for the first settings, for a while."""
        self._following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(_FIRST_S):
                await self._current.are_here.wait()
        except TimeoutError:
            logger.warning("no settings after %g s: nothing is served until they come", _FIRST_S)

    def stop(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()

    def check_alive(self) -> None:
        """Raise RuntimeError when the settings are not followed any more."""
        if self._following is not None and self._following.done():
            raise RuntimeError("the settings are not followed any more")

    async def _follow(self) -> None:
        while True:
            seen = self._current.version
            try:
                news = await self._client.settings(self._process_id, seen, _HOLD_S)
            except DispatcherUnavailable as error:
                logger.debug("settings are asked for again: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if news is None:
                continue
            try:
                self._current.put(news)
            except ValidationError as error:
                # of a dispatcher of another release; those before stay
                logger.error("settings %s are not understood: %s", news.version, error)
                await asyncio.sleep(_HOLD_S)
                continue
            logger.info("settings %s are applied", news.version)
