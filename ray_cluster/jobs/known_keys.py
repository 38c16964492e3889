"""The API keys that were in force last, for a dispatcher that starts without any."""

from __future__ import annotations

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.config.sections.keys import ApiKey
from ray_cluster.errors import ConfigError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads

_NAME = "api_keys"
_KEYS: TextCodec[tuple[ApiKey, ...]] = TextCodec(tuple[ApiKey, ...])


class KnownKeys:
    """Saves keys as digests, through the job store.

    Without it a service whose last key was lost from its file would be open after a restart.
    """

    def __init__(self, store: SqlJobStore, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self._latest: tuple[ApiKey, ...] = ()

    async def load(self) -> tuple[ApiKey, ...]:
        """Return the keys that were saved last; none if none ever were.

        Raises:
            JobStoreError: the store cannot be read.
            ConfigError: another version has saved them: nobody knows who may call.
        """
        saved = await self._threads.call("read", self._store.control)
        try:
            return _KEYS.decode(saved[_NAME]) if _NAME in saved else ()
        except CodecError as error:
            raise ConfigError(
                "the configuration has no API key, and those that were in force before cannot be "
                f"read ({error}): set http.api_keys, or http.open: true to let anybody call"
            ) from error

    async def save(self, keys: tuple[ApiKey, ...]) -> None:
        """Write the keys in force, however long that takes: one that was revoked stays so.

        They are in force meanwhile. Of several sets the last one is written.
        """
        self._latest = keys

        def write() -> None:
            self._store.save_control(_NAME, _KEYS.encode(self._latest))

        await self._threads.write_surely("the set of API keys in force", write)
