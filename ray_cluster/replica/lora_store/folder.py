"""The factors of LoRAs on the disk of a node: fetched, verified and converted once.

Every process of the node may use the folder: what is done to a LoRA is done under a lock of its
own, which a process that dies releases. What a LoRA leaves goes when a store hears that it was
removed from the service, or once nobody has used it for a month; files of locks, and what is half
done, go at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.errors import InvalidRequest, RayClusterError, RequestFailed
from ray_cluster.imaging.processes.worker_process import Message, ProcessDied
from ray_cluster.models.sources.lora_sources import SUFFIX
from ray_cluster.protocol.loras import FailureKind, LoraFacts, LoraOrder
from ray_cluster.replica.lora_store.processes import LoraProcesses, LoraThreads

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FACTS, _LOCK = ".json", ".lock"
_FILE_BYTES = "file_bytes"
_LOCK_WAIT_S = 0.1
# of one whose removal no store has heard of
_MOST_UNUSED_S = 30 * 86400.0
# characters; names in a file can be of any length
_MAX_REASON = 500


class LoraUnavailable(RayClusterError):
    """A LoRA is not to be had.

    Attributes:
        failure: whether it never will be.
        reason: for clients.
    """

    def __init__(self, failure: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.failure: FailureKind = failure
        self.reason = reason


class LoraFolder:
    """Owns the folder of LoRAs of a node, together with those of other processes.

    Args:
        arguments: where it is, what may come into it, and how much.
        wall_clock: Unix time in seconds, that of the files.
        workers: fetch and convert; child processes of its own unless given.
    """

    def __init__(
        self,
        arguments: LorasConfig,
        wall_clock: Callable[[], float] = time.time,
        *,
        workers: LoraProcesses | LoraThreads | None = None,
    ) -> None:
        self._arguments = arguments
        self._wall_clock = wall_clock
        self._root = Path(arguments.folder)
        self._parts = self._root / "parts"
        self._processes = workers or LoraProcesses()

    def prepare(self) -> None:
        """Make the folder, and remove what dead processes have left half done."""
        self._parts.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Delete what is half done, facts without factors, and locks, unless somebody is at it."""
        facts = (one for one in self._root.glob(f"*{_FACTS}") if not self._has_factors(one.stem))
        found = (*self._parts.glob("*"), *self._root.glob(f"*{_LOCK}"), *facts)
        ids = {path.name.partition(".")[0] for path in found}
        for lora_id in filter(_ID.fullmatch, ids):
            if (number := self._lock(lora_id)) is None:
                continue
            try:
                _delete(*self._parts.glob(f"{lora_id}.*"))
                if not self._has_factors(lora_id):
                    _delete(self._path(lora_id, _FACTS))
            finally:
                self._unlock(lora_id, number)

    def _has_factors(self, stem: str) -> bool:
        return (self._root / f"{stem}{SUFFIX}").exists()

    def warm_up(self) -> None:
        """Start the process that converts: its imports take seconds."""
        self._processes.warm_up()

    def path_of(self, lora_id: str) -> Path | None:
        """Return the file with a LoRA's factors, and note its use; None if it is not here."""
        path = self._path(lora_id, SUFFIX)
        try:
            os.utime(path)
        except OSError:
            # one whose use cannot be noted can be read all the same
            return path if os.path.exists(path) else None
        return path

    def discard(self, lora_id: str) -> None:
        """Delete a LoRA that cannot be read; the next one who needs it fetches it again."""
        _delete(self._path(lora_id, SUFFIX), self._path(lora_id, _FACTS))

    def facts(self) -> dict[str, LoraFacts]:
        """Return what is here, by id."""
        found = ((path.stem, self.facts_of(path.stem)) for path in self._files())
        return {lora_id: facts for lora_id, facts in found if facts is not None}

    @property
    def ids(self) -> set[str]:
        """What has a file here."""
        return {path.stem for path in self._files()}

    @property
    def max_bytes(self) -> int:
        """Bound on all factors here."""
        return self._arguments.max_disk_bytes

    def _files(self) -> list[Path]:
        found = self._root.glob(f"*{SUFFIX}")
        return [path for path in found if _ID.fullmatch(path.stem) is not None]

    def facts_of(self, lora_id: str) -> LoraFacts | None:
        """Return what is known of a LoRA; None unless its file is here, and as long as it was."""
        try:
            values: dict[str, Any] = json.loads(self._path(lora_id, _FACTS).read_text())
            num_bytes = values.pop(_FILE_BYTES)
            facts = LoraFacts(**{**values, "ranks": tuple(values["ranks"])})
            is_whole = self._path(lora_id, SUFFIX).stat().st_size == num_bytes
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return facts if is_whole else None

    async def ensure(self, order: LoraOrder) -> LoraFacts:
        """Have a LoRA here, and return what it is.

        Raises:
            LoraUnavailable: it is not to be had.
        """
        try:
            async with self._locked(order.lora.lora_id):
                return await self._ensure(order)
        except OSError as error:
            reason = f"{type(error).__name__} in the folder of LoRAs: {error.strerror}"
            raise LoraUnavailable("unreachable", reason) from error

    async def _ensure(self, order: LoraOrder) -> LoraFacts:
        lora_id = order.lora.lora_id
        facts = self.facts_of(lora_id)
        if facts is not None and self.path_of(lora_id) is not None:
            return facts
        # a name of its own: what has died over an earlier one may still write to that
        stem = f"{lora_id}.{secrets.token_hex(4)}"
        file, converted = self._parts / f"{stem}{SUFFIX}", self._parts / f"{stem}.factors"
        try:
            sha256 = await self._fetch(order, file)
            facts = await self._convert(order, file, sha256, converted)
            self._publish(lora_id, facts, converted)
        finally:
            # a converter that was killed has left a third one
            _delete(*self._parts.glob(f"{stem}.*"))
        return facts

    def _publish(self, lora_id: str, facts: LoraFacts, converted: Path) -> None:
        values = {**asdict(facts), _FILE_BYTES: converted.stat().st_size}
        # the factors last: they are what says that it is here
        self._path(lora_id, _FACTS).write_text(json.dumps(values))
        converted.replace(self._path(lora_id, SUFFIX))

    async def _fetch(self, order: LoraOrder, target: Path) -> str:
        """Copy the source to a file; return its digest."""
        arguments = self._arguments
        header = {
            "source": order.lora.source,
            "allowed": list(arguments.sources),
            "target": str(target),
            "bounds": {
                "max_bytes": arguments.max_file_bytes,
                "private_hosts": arguments.private_hosts,
                "min_bytes_per_s": arguments.min_fetch_bytes_per_s,
            },
            "sha256": order.lora.sha256,
        }
        timeout_s = arguments.fetch_timeout_s
        try:
            reply = await self._processes.fetch(Message(header), timeout_s)
        except ProcessDied as error:
            reason = f"its source did not answer within {timeout_s:g} s, or ended its reader"
            raise LoraUnavailable("unreachable", reason) from error
        except InvalidRequest as error:
            raise LoraUnavailable("invalid", error.message[:_MAX_REASON]) from error
        except RequestFailed as error:
            raise LoraUnavailable("unreachable", _shortened(error.message)) from error
        return str(reply.header["sha256"])

    async def _convert(self, order: LoraOrder, file: Path, sha256: str, target: Path) -> LoraFacts:
        header = {
            "file": str(file),
            "base_model": order.base_model,
            "target": str(target),
            "sha256": sha256,
        }
        try:
            reply = await self._processes.convert(Message(header), order.lora.owner)
        except InvalidRequest as error:
            reason = error.message.replace(file.name, "it")
            raise LoraUnavailable("invalid", reason[:_MAX_REASON]) from error
        except ProcessDied as error:
            reason = "the process that converts it ended at it, or took too long"
            raise LoraUnavailable("unreachable", reason) from error
        except RequestFailed as error:
            # a full disk, a missing base model: not the file's fault
            raise LoraUnavailable("unreachable", _shortened(error.message)) from error
        values = dict(reply.header)
        return LoraFacts(**{**values, "ranks": tuple(values["ranks"])})

    @asynccontextmanager
    async def _locked(self, lora_id: str) -> AsyncIterator[None]:
        """Keep every other process of the node from doing the same."""
        while True:
            if (number := self._lock(lora_id)) is not None:
                break
            await asyncio.sleep(_LOCK_WAIT_S)
        try:
            yield
        finally:
            self._unlock(lora_id, number)

    def _lock(self, lora_id: str) -> int | None:
        """Return the descriptor of its lock; None while somebody else has it."""
        self._parts.mkdir(parents=True, exist_ok=True)
        path = self._path(lora_id, _LOCK)
        number = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        is_mine = False
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # who had it may have deleted it just now: the next one locks another file
            is_mine = _is_at(number, path)
        except BlockingIOError:
            pass
        finally:
            if not is_mine:
                os.close(number)
        return number if is_mine else None

    def _unlock(self, lora_id: str, number: int) -> None:
        """Release a lock, and leave no file of it: there may be thousands of LoRAs in time."""
        try:
            # while it is held: nobody has opened it who would not look whether it is still there
            _delete(self._path(lora_id, _LOCK))
        finally:
            os.close(number)

    def evict(self, keep: Collection[str], removed: Collection[str] = ()) -> list[str]:
        """Delete what was not used for longest until the rest is within bounds; return the ids.

        Also what was not used for a month, and what dead processes have left.

        Args:
            keep: ids that stay.
            removed: ids that go, whatever room there is.
        """
        self._remove_leftovers()
        files = []
        for path in self._files():
            with suppress(FileNotFoundError):
                stat = path.stat()
                # those that were removed come first
                files.append((path.stem not in removed, stat.st_mtime, stat.st_size, path))
        excess, gone = sum(size for _, _, size, _ in files) - self._arguments.max_disk_bytes, []
        unused_since_s = self._wall_clock() - _MOST_UNUSED_S
        for is_left, used_s, size, path in sorted(files):
            if is_left and excess <= 0 and used_s >= unused_since_s:
                break
            if path.stem in keep:
                continue
            # who has it mapped keeps it until it is closed
            self.discard(path.stem)
            excess -= size
            gone.append(path.stem)
        return gone

    @property
    def num_bytes(self) -> int:
        """Of all factors here."""
        found = 0
        for path in self._files():
            with suppress(FileNotFoundError):
                found += path.stat().st_size
        return found

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def _path(self, lora_id: str, suffix: str) -> Path:
        assert _ID.fullmatch(lora_id), f"{lora_id!r} is no id of a LoRA"
        return self._root / f"{lora_id}{suffix}"


def _delete(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _is_at(number: int, path: Path) -> bool:
    """Whether an open file is the one that a path leads to."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _shortened(message: str) -> str:
    """Return what an error says, without what may be secret in a URL."""
    return re.sub(r"\?\S+", "?...", message)[:_MAX_REASON]
