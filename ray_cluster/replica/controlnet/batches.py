"""The rows that a ControlNet's worker is to compute: in which order, and what becomes of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.controlnets.asks import RowResiduals
from ray_cluster.engine.controlnets.bank import Bank, BankRow
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import MODEL_ERRORS, DeviceBroken
from ray_cluster.replica.controlnet.metrics import ControlNetServerMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRow:
    """A step of a request that is to be computed.

    Attributes:
        client: who asks.
        call: the client's number of it.
        key: of the request, the client's own.
        latents: ``[C, h, w]``.
        due_s: instant after which its image would be late, on the worker's clock.
    """

    client: int
    call: int
    key: str
    latents: Tensor
    timestep: float
    due_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What became of a row.

    Attributes:
        residuals: None if there are none.
        refusal: why there will not be any; None if the request must be opened first.
    """

    row: WaitingRow
    residuals: RowResiduals | None = None
    refusal: str | None = None


class ControlNetBatches:
    """Rows of several clients over one bank; one thread calls it.

    Clients' keys never mix. The most urgent rows are computed first, as many as there are and at
    most ``max_batch``; none waits for others.

    Args:
        name: of the ControlNet.
        clock: monotonic seconds.

    Attributes:
        max_batch: rows of one model call at most.
    """

    def __init__(
        self,
        name: str,
        bank: Bank,
        *,
        max_batch: int,
        clock: Callable[[], float],
        metrics: ControlNetServerMetrics,
    ) -> None:
        self.max_batch = max_batch
        self._name = name
        self._bank = bank
        self._clock = clock
        self._metrics = metrics
        self._waiting: list[WaitingRow] = []
        # by client, and why requests could not be opened
        self._keys: dict[int, set[str]] = {}
        self._refused: dict[tuple[int, str], str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, client: int, key: str, conditioning: Conditioning, control_map: Tensor) -> None:
        """Keep what stays the same in all steps of a request; ``control_map`` as banks take it.

        Raises:
            DeviceBroken: see :mod:`ray_cluster.engine.device.device_errors`.
        """
        self._refused.pop((client, key), None)
        self._keys.setdefault(client, set()).add(key)
        try:
            self._bank.open(_within(client, key), conditioning, control_map)
        except DeviceBroken:
            raise
        except Exception as error:  # noqa: BLE001
            raise_if_broken(error)
            self._refused[client, key] = self._why(error)

    def step(self, rows: Sequence[WaitingRow]) -> None:
        """Compute rows when their turns come."""
        self._waiting += rows

    def close(self, client: int, key: str) -> None:
        """Forget a request, and its rows that wait."""
        self._keys.get(client, set()).discard(key)
        self._forget(client, key)

    def leave(self, client: int) -> None:
        """Forget all of a client that is gone."""
        for key in self._keys.pop(client, set()):
            self._forget(client, key)
        self._waiting = [one for one in self._waiting if one.client != client]

    def compute(self) -> list[Answer]:
        """Compute the most urgent rows.

        Raises:
            DeviceBroken: see :mod:`ray_cluster.engine.device.device_errors`.
        """
        self._waiting.sort(key=lambda row: row.due_s)
        batch = self._waiting[: self.max_batch]
        del self._waiting[: len(batch)]
        answers, rows = [], []
        for row in batch:
            refusal = self._refused.get((row.client, row.key))
            if refusal is None and self._bank.knows(_within(row.client, row.key)):
                rows.append(row)
            else:
                answers.append(Answer(row, refusal=refusal))
        if rows:
            answers += self._computed(rows)
        for one in answers:
            self._metrics.answered(_result(one))
        return answers

    def _computed(self, rows: Sequence[WaitingRow]) -> list[Answer]:
        """Compute rows together; if that fails in halves, so that only the culprit fails."""
        began_s = self._clock()
        try:
            found = self._bank.compute(
                [BankRow(_within(row.client, row.key), row.latents, row.timestep) for row in rows]
            )
        except DeviceBroken:
            raise
        except Exception as error:  # noqa: BLE001
            raise_if_broken(error)
            why = self._why(error)
        else:
            self._metrics.computed(len(rows), self._clock() - began_s)
            return [Answer(row, one) for row, one in zip(rows, found, strict=True)]
        if len(rows) == 1:
            return [Answer(rows[0], refusal=why)]
        logger.warning("%d rows are computed in halves: %s", len(rows), why)
        middle = len(rows) // 2
        return [*self._computed(rows[:middle]), *self._computed(rows[middle:])]

    def _why(self, error: Exception) -> str:
        """Return why a row is refused.

        Also for an error that nobody expected: one that ended the thread would end each replica
        that the request is sent to in turn.
        """
        if not isinstance(error, MODEL_ERRORS):
            logger.error("ControlNet %s has failed unexpectedly", self._name, exc_info=error)
            return f"ControlNet {self._name!r}: an unexpected {type(error).__name__}"
        return f"ControlNet {self._name!r}: {type(error).__name__}: {error}"

    def _forget(self, client: int, key: str) -> None:
        self._bank.close(_within(client, key))
        self._refused.pop((client, key), None)
        self._waiting = [one for one in self._waiting if (one.client, one.key) != (client, key)]


def _within(client: int, key: str) -> str:
    """Return the bank's key of a client's."""
    return f"{client}:{key}"


def _result(answer: Answer) -> str:
    if answer.residuals is not None:
        return "computed"
    return "unknown" if answer.refusal is None else "refused"
