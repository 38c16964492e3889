"""Watches the settings' file, and applies what changes in it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextvars import Context

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.errors import ConfigError

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
# an editor may write a file in pieces, and a piece may be valid: without its last lines a document
# may ask for no key. What has changed must stay so for this long
_SETTLED_S = 0.2


class SettingsWatch:
    """Looks at a file every second; a broken one is refused, and what was applied stays in force.

    Args:
        on_change: called with the configuration on the event loop, first by :meth:`start`.
    """

    def __init__(
        self,
        file: SettingsFile,
        on_change: Callable[[ClusterConfig], None],
        every_s: float = _EVERY_S,
    ) -> None:
        self._file = file
        self._on_change = on_change
        self._every_s = every_s
        self._digest = ""
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        # looks of the task and of others come one after the other
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        """Apply the file as it is, and begin to watch it; ConfigError if it is broken now."""
        await self.look()
        if self._problem:
            raise ConfigError(self._problem)
        # in a context of its own: Serve cancels what a cancelled request has called
        self._task = asyncio.create_task(self._watch_forever(), context=Context())

    @property
    def problem(self) -> str:
        """What is wrong with the file as it is; empty if it is applied."""
        return self._problem

    @property
    def is_healthy(self) -> bool:
        """Whether the file is still being looked at."""
        return self._task is not None and not self._task.done()

    async def look(self) -> None:
        """Apply the file if its content has changed since the last look, and has settled."""
        async with self._looking:
            try:
                content = await asyncio.to_thread(self._file.content)
            except ConfigError as error:
                self._refuse("", error)
                return
            digest = hashlib.sha256(content).hexdigest()
            if digest == self._digest:
                return
            await asyncio.sleep(_SETTLED_S)
            try:
                if await asyncio.to_thread(self._file.content) != content:
                    return
                config = await asyncio.to_thread(self._file.parse, content)
            except ConfigError as error:
                self._refuse(digest, error)
                return
            self._digest, self._problem = digest, ""
            self._on_change(config)

    def _refuse(self, digest: str, error: ConfigError) -> None:
        problem = f"the settings were refused, the earlier ones stay in force: {error}"
        if problem != self._problem or digest != self._digest:
            logger.error(problem)
        self._digest, self._problem = digest, problem

    def stop(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()
