"""How much is measured of LoRAs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.settings import NUM_STEPS


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Sizes and repetitions.

    Attributes:
        px: side of the images, the model's native one.
        batches: requests of a step.
        step_rounds: steps of each way that is compared.
        per_request: LoRAs of each request in the comparison with diffusers.
        in_flight: requests at a time there.
        num_steps: of these requests.
        rounds: repetitions of each cell there.
        load_rounds: repetitions of each part of loading.
        late_shares: of the steps that are without LoRAs.
        late_images: with each LoRA and share.
        sets: different sets in a batch of eight, where merging is compared.
        run_steps: steps of their rows.
        merge_rounds: repetitions of each way there.
    """

    px: int = 64
    batches: tuple[int, ...] = (1, 4, 8)
    step_rounds: int = 15
    per_request: tuple[int, ...] = (0, 1, 2)
    in_flight: tuple[int, ...] = (1, 4, 8)
    num_steps: int = NUM_STEPS
    rounds: int = 7
    load_rounds: int = 15
    late_shares: tuple[float, ...] = (0.1, 0.15, 0.2, 0.3)
    late_images: int = 24
    sets: tuple[int, ...] = (1, 2, 4, 8)
    run_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    merge_rounds: int = 7


def quick_lora_settings() -> LoraSettings:
    """Return settings of half a minute that only show that everything works."""
    return LoraSettings(
        batches=(1, 4),
        step_rounds=2,
        per_request=(0, 2),
        in_flight=(1, 4),
        num_steps=3,
        rounds=1,
        load_rounds=2,
        late_shares=(0.3,),
        late_images=2,
        sets=(1, 2),
        run_steps=(1, 4),
        merge_rounds=2,
    )
