"""How much is measured of edits."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.settings import NUM_STEPS


@dataclass(frozen=True, slots=True)
class EditSettings:
    """Sizes and repetitions.

    Attributes:
        px: side of the edits whose speed is compared, the model's native one.
        strengths, in_flight: cells of the comparison.
        num_steps: of the whole schedule.
        rounds: repetitions of each cell.
        sizes_px: sides of the images whose handling is timed.
        handling_rounds: repetitions of each of these.
    """

    px: int = 64
    strengths: tuple[float, ...] = (1.0, 0.6, 0.3)
    in_flight: tuple[int, ...] = (1, 4, 8)
    num_steps: int = NUM_STEPS
    rounds: int = 9
    sizes_px: tuple[int, ...] = (64, 512, 1024)
    handling_rounds: int = 15


def quick_edit_settings() -> EditSettings:
    """Return settings of half a minute that only show that everything works."""
    return EditSettings(
        strengths=(1.0, 0.6),
        in_flight=(1, 4),
        num_steps=5,
        rounds=2,
        sizes_px=(64, 256),
        handling_rounds=2,
    )
