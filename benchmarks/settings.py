"""How much is measured: the full run, and a quick one that only shows that everything works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Report = Callable[[float, str], None]
"""Told by a section how far it is, in [0, 1], and what it does at the moment."""

MODEL = "shapes-sd"
NUM_STEPS = 20
GUIDANCE = 3.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and repetitions of every section.

    Attributes:
        engine_s: wall seconds after which the engine section starts no further round.
        min_rounds: rounds it makes even so.
        size_turns: steps of each way in each cell of the section of mixed sizes.
        stream_requests: requests of its streams, each of which is made ``stream_turns`` times.
        step_pairs: engine steps compared with a bare model call, per batch.
        family_pairs: images of the light and of the heavy model that are compared.
        kernel_rounds: samples of every implementation of an op.
        short_requests: requests of 2 steps in the sequential service section.
        long_requests: requests of 20 steps in it.
        throughput_blocks: blocks of requests by 8 clients.
        dispatcher_replicas: numbers of fake replicas in the dispatcher section.
        dispatcher_s: seconds for which each of its rows is measured.
        dispatcher_depth: requests that wait in its rows with a deep queue.
        load_clients: clients at once in the load section, half of them with jobs.
        load_s: for how long.
        load_sample_s: seconds between two looks at the memory.
        dispatcher_image_s: seconds that an image takes in its rows at the pace of real images.
    """

    sizes_px: tuple[int, ...] = (64, 96, 128)
    in_flight: tuple[int, ...] = (1, 4, 8, 16)
    num_steps: int = NUM_STEPS
    engine_s: float = 240.0
    min_rounds: int = 2
    max_rounds: int = 9
    mixed_requests: int = 24
    size_turns: int = 15
    stream_requests: int = 18
    stream_turns: int = 4
    step_pairs: int = 40
    family_pairs: int = 25
    kernel_rounds: int = 60
    short_requests: int = 100
    long_requests: int = 40
    throughput_blocks: int = 4
    replica_counts: tuple[int, ...] = (1, 2)
    dispatcher_replicas: tuple[int, ...] = (1, 8, 64, 512)
    dispatcher_s: float = 5.0
    dispatcher_depth: int = 1000
    dispatcher_image_s: float = 2.0
    load_clients: int = 64
    load_s: float = 300.0
    load_sample_s: float = 10.0
    aim_px: int = 64
    guidance_scales: tuple[float, ...] = field(default=(1.0, GUIDANCE))


def quick_settings() -> Settings:
    """Return settings of about a minute and no worth as a measurement."""
    return Settings(
        sizes_px=(64,),
        in_flight=(1, 4),
        num_steps=3,
        engine_s=0.0,
        min_rounds=1,
        max_rounds=1,
        mixed_requests=6,
        size_turns=2,
        stream_requests=4,
        stream_turns=1,
        step_pairs=4,
        family_pairs=3,
        kernel_rounds=3,
        short_requests=6,
        long_requests=2,
        throughput_blocks=1,
        replica_counts=(1,),
        dispatcher_replicas=(1, 8),
        dispatcher_s=0.3,
        dispatcher_depth=50,
        dispatcher_image_s=0.2,
        load_s=20.0,
        load_sample_s=2.0,
    )
