"""The settings in force: read from a watched file, and handed to gateways."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from contextvars import Context

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.settings import GatewaySettings, gateway_settings

logger = logging.getLogger(__name__)

# between two long polls of a gateway that lives
_GAP_S = 5.0
_MAX_HELD_S = 30.0
_EVERY_S = 1.0
# an editor may write a file in pieces, and a piece may be valid: without its last lines a document
# may ask for no key. So a change must last this long
_SETTLED_S = 0.2


class SettingsBook:
    """Hands the settings in force to gateways, and keeps which version each has applied.

    Gateways get none before the first :meth:`put`: whoever stands by serves nobody.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = asyncio.Event()
        # version and the instant until which it counts as alive, by process
        self._applied: dict[str, tuple[str, float]] = {}
        self.settings = settings
        self._for_gateways = gateway_settings(settings)
        self._is_in_force = False

    def put(self, settings: Settings) -> None:
        """Put other settings in force, and answer all held calls for them."""
        self._is_in_force = True
        self.settings = settings
        self._for_gateways = gateway_settings(settings)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, process_id: str, seen: str, wait_s: float) -> GatewaySettings | None:
        """Return the settings once their version is not ``seen``; None after ``wait_s``."""
        wait_s = min(wait_s, _MAX_HELD_S)
        self._applied[process_id] = (seen, self._clock() + wait_s + _GAP_S)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self._is_news(seen):
                        await self._changed.wait()
        except asyncio.CancelledError:
            # its process is gone, or will call again
            self._applied.pop(process_id, None)
            raise
        return self._for_gateways if self._is_news(seen) else None

    def _is_news(self, seen: str) -> bool:
        return self._is_in_force and seen != self.settings.version

    def version_by_gateway(self) -> dict[str, str]:
        """Return the version that each live gateway has applied; empty where none yet."""
        now_s = self._clock()
        self._applied = {
            process_id: (version, until_s)
            for process_id, (version, until_s) in self._applied.items()
            if until_s >= now_s
        }
        return {process_id: version for process_id, (version, _) in self._applied.items()}


class SettingsWatch:
    """Looks at a file every second; a broken one is refused, and what was applied stays in force.

    Args:
        on_change: called with the configuration on the event loop, first by :meth:`start`;
            raises :class:`ConfigError` for one that must not follow what was applied.
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
        """Whether the file is watched, or not yet: one that stands by knows all that it needs."""
        return self._task is None or not self._task.done()

    async def look(self) -> None:
        """Apply the file if its content has changed since the last look, and has settled."""
        async with self._looking:
            try:
                seen = await asyncio.to_thread(self._file.look)
            except ConfigError as error:
                self._refuse("", error)
                return
            digest = hashlib.sha256(b"\0".join(seen)).hexdigest()
            if digest == self._digest:
                return
            await asyncio.sleep(_SETTLED_S)
            try:
                if await asyncio.to_thread(self._file.look) != seen:
                    return
                config = await asyncio.to_thread(self._file.parse, seen[0])
            except ConfigError as error:
                self._refuse(digest, error)
                return
            try:
                self._on_change(config)
            except ConfigError as error:
                # it may follow what runs later, such as after a redeploy
                self._refuse("", error)
                return
            self._digest, self._problem = digest, ""

    def _refuse(self, digest: str, error: ConfigError) -> None:
        problem = f"the settings were refused, the earlier ones stay in force: {error}"
        if problem != self._problem or digest != self._digest:
            logger.error(problem)
        self._digest, self._problem = digest, problem

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()
