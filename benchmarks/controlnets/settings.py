"""How much is measured of ControlNets."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.settings import NUM_STEPS


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Sizes and repetitions.

    Attributes:
        px: side of the images, the model's native one.
        num_steps: of each image.
        controls: ControlNets of each request.
        loras: LoRAs of each request.
        in_flight: requests at a time.
        rounds: repetitions of each cell.
        step_rounds: steps of each way that are compared.
    """

    px: int = 64
    num_steps: int = NUM_STEPS
    controls: tuple[int, ...] = (0, 1, 2, 3)
    loras: tuple[int, ...] = (0, 2)
    in_flight: tuple[int, ...] = (1, 4)
    rounds: int = 5
    step_rounds: int = 200


def quick_control_settings() -> ControlSettings:
    """Return settings of a minute that only show that everything works."""
    return ControlSettings(
        num_steps=3, controls=(0, 3), loras=(0,), in_flight=(4,), rounds=1, step_rounds=5
    )
