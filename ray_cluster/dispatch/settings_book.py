"""The settings in force, and which gateways have applied them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ray_cluster.config.settings import Settings
from ray_cluster.protocol.settings import GatewaySettings, gateway_settings

# between two long polls of a gateway that lives
_GAP_S = 5.0
_MAX_HELD_S = 30.0


class SettingsBook:
    """Hands the settings in force to gateways, and keeps which version each has applied.

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

    def put(self, settings: Settings) -> None:
        """Have other settings in force, and answer everybody who waits for some."""
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
                    while seen == self.settings.version:
                        await self._changed.wait()
        except asyncio.CancelledError:
            # its process is gone, or will call again
            self._applied.pop(process_id, None)
            raise
        return None if seen == self.settings.version else self._for_gateways

    def version_by_gateway(self) -> dict[str, str]:
        """Return the version that each live gateway has applied; empty where none yet."""
        now_s = self._clock()
        self._applied = {
            process_id: (version, until_s)
            for process_id, (version, until_s) in self._applied.items()
            if until_s >= now_s
        }
        return {process_id: version for process_id, (version, _) in self._applied.items()}
