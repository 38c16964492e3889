"""What weights an engine's model computes with: its own, or those of all its rows' LoRAs."""

from __future__ import annotations

from collections.abc import Mapping

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.step.step_call import Held


class WeightSwitch:
    """Exchanges the weights of one engine's model between its steps; the step thread calls it.

    Args:
        rows: those that the engine holds, by request id.
    """

    def __init__(self, rows: Mapping[str, Held]) -> None:
        self._rows = rows
        self._merged: MergedWeights | None = None

    @property
    def merged(self) -> MergedWeights | None:
        """What the model computes with in place of its own weights; None for these."""
        return self._merged

    def admit(self, deltas: LayerDeltas | None) -> bool:
        """Return whether a row that comes has its deltas in the weights.

        For one that has others, or none, the model gets its own weights back.
        """
        if self._merged is not None and deltas is not self._merged.deltas:
            self.unmerge()
        return self._merged is not None

    def merge(self, weights: MergedWeights) -> None:
        """Compute with weights that have the deltas of all rows held in them.

        It lasts until a row of others comes, or until :meth:`unmerge`.

        Raises:
            ValueError: some row has others, or not all weights are made.
        """
        others = [one for one, row in self._rows.items() if row.deltas is not weights.deltas]
        if others:
            raise ValueError(
                f"{len(others)} of {len(self._rows)} rows, such as {others[0]!r}, have other LoRAs "
                "than those to be merged, or none; wait until they are done"
            )
        self.unmerge()
        weights.exchange()
        self._note(weights)

    def unmerge(self) -> None:
        """Compute with the model's own weights from now on."""
        if self._merged is not None:
            self._merged.exchange()
            self._note(None)

    def _note(self, weights: MergedWeights | None) -> None:
        self._merged = weights
        for row in self._rows.values():
            row.is_merged = weights is not None
