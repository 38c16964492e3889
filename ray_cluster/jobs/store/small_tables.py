"""What a job store has beside jobs: LoRAs, workers, and what the controller saves."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ray_cluster.codec.values import TextCodec
from ray_cluster.jobs.store.job_rows import UNREADABLE
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.loras import Lora, LoraFacts

logger = logging.getLogger(__name__)

_LORAS = sa.table("loras", *map(sa.column, ("lora_id", "is_removed", "lora", "facts")))
_WORKERS = sa.table("workers", *map(sa.column, ("pool", "registered_s", "registration")))

_CONTROL = sa.table("control", *map(sa.column, ("name", "document")))

_LORA: TextCodec[Lora] = TextCodec(Lora)
_FACTS: TextCodec[LoraFacts] = TextCodec(LoraFacts)
_REGISTRATION: TextCodec[Registration] = TextCodec(Registration)


def insert_into(table: sa.TableClause, dialect: str) -> sqlite.Insert | postgresql.Insert:
    """Return an insertion that may say what to do about a conflict."""
    return sqlite.Insert(table) if dialect == "sqlite" else postgresql.Insert(table)


class SmallTables(ABC):
    """Reads and writes them; every method raises :class:`.JobStoreError` when the store fails."""

    @abstractmethod
    def _transaction(self, *, writes: bool = False) -> AbstractContextManager[sa.Connection]: ...

    def save_worker(self, registration: Registration, registered_s: float) -> None:
        """Write how a pool's workers registered last, in place of what there was."""
        # who it was and where it listened is of no use later
        saved = replace(registration, replica_id="", endpoint=None)
        values = {"registered_s": registered_s, "registration": _REGISTRATION.encode(saved)}
        changes = sa.update(_WORKERS).where(_WORKERS.c.pool == registration.pool).values(values)
        with self._transaction(writes=True) as connection:
            if not connection.execute(changes).rowcount:
                row = {"pool": registration.pool, **values}
                connection.execute(sa.insert(_WORKERS).values(row))

    def workers(self) -> list[Registration]:
        """Return how each pool's workers registered last, as far as it can be read."""
        found = []
        with self._transaction() as connection:
            for row in connection.execute(sa.select(_WORKERS).order_by(_WORKERS.c.pool)):
                # one of another version is as good as none: its pool registers again
                with suppress(*UNREADABLE):
                    found.append(_REGISTRATION.decode(row.registration))
        return found

    def save_control(self, name: str, document: str) -> None:
        """Write what is saved under a name, in place of what there was."""
        changes = sa.update(_CONTROL).where(_CONTROL.c.name == name).values(document=document)
        with self._transaction(writes=True) as connection:
            if not connection.execute(changes).rowcount:
                row = {"name": name, "document": document}
                connection.execute(sa.insert(_CONTROL).values(row))

    def control(self) -> dict[str, str]:
        """Return what the controller and :class:`KnownKeys` have saved, by name."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(_CONTROL))
            return {row.name: row.document for row in rows}

    def add_lora(self, lora: Lora) -> None:
        """Write a new LoRA."""
        row = {"lora_id": lora.lora_id, "is_removed": False, "lora": _LORA.encode(lora)}
        with self._transaction(writes=True) as connection:
            # it is there if an earlier call's answer was lost
            connection.execute(
                insert_into(_LORAS, connection.dialect.name).values(row).on_conflict_do_nothing()
            )

    def note_facts(self, lora_id: str, facts: LoraFacts) -> None:
        """Write what was found out of a LoRA."""
        self._change_lora(lora_id, facts=_FACTS.encode(facts))

    def remove_lora(self, lora_id: str) -> None:
        """Write that a LoRA is to be forgotten once no open request uses it."""
        self._change_lora(lora_id, is_removed=True)

    def _change_lora(self, lora_id: str, **values: Any) -> None:
        changes = sa.update(_LORAS).where(_LORAS.c.lora_id == lora_id).values(values)
        with self._transaction(writes=True) as connection:
            connection.execute(changes)

    def forget_lora(self, lora_id: str) -> None:
        """Delete a LoRA's row."""
        with self._transaction(writes=True) as connection:
            connection.execute(sa.delete(_LORAS).where(_LORAS.c.lora_id == lora_id))

    def loras(self) -> list[tuple[Lora, LoraFacts | None, bool]]:
        """Return every LoRA that can be read, what is known of it, and whether it is removed."""
        found = []
        with self._transaction() as connection:
            for row in connection.execute(sa.select(_LORAS).order_by(_LORAS.c.lora_id)):
                try:
                    facts = None if row.facts is None else _FACTS.decode(row.facts)
                    found.append((_LORA.decode(row.lora), facts, bool(row.is_removed)))
                except UNREADABLE as error:
                    logger.error("the LoRA %s is left alone: %a", row.lora_id, str(error))
        return found
