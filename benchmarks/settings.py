"""How much is measured: the full run, and a quick one that only shows that everything works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Report = Callable[[float, str], None]
"""A section calls it with its progress in [0, 1] and what it does at the moment."""

MODEL = "shapes-sd"
NUM_STEPS = 20
GUIDANCE = 3.0
SCALES = (1.0, GUIDANCE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and repetitions of every section of ``benchmarks.run``.

    Attributes:
        sizes_px, in_flight, num_steps: cells of the engine section.
        rounds: repetitions of each of them, and of each stream of requests.
        stream_requests: requests of a stream with mixed sizes or steps.
        step_rounds: engine steps of each way that is compared.
        size_rounds: the same, of rows of several sizes.
        family_rounds: images of the light and of the heavy model.
        kernel_rounds: samples of every implementation of an op.
        short_requests, long_requests: requests of 2 and of 20 steps in the service section.
        throughput_rounds: blocks of requests by 8 clients.
        replica_counts: the service is started once with each.
        dispatcher_replicas: simulated replicas of the dispatcher section's rows.
        dispatcher_s: seconds for which each row is measured.
        dispatcher_depth: requests in the queue of the row with a deep one.
        dispatcher_image_s: seconds of an image in the rows at the pace of real images.
        load_clients: concurrent clients of the load section, half of them with jobs.
        load_s, load_sample_s: how long, and how often memory is read.
        cascade_prompts: of the cascade section, each made three ways.
        cascade_load_s: seconds of each row under load.
        lora_count: LoRAs at the source of the loras section.
        lora_calls: of each of its ways.
        lora_warm_s: seconds in which its capacity is measured, and twice those of a round of peers.
        lora_rounds: of peers, with and without fetching.
        lora_cold: LoRAs that are fetched in a round.
        control_calls: with 0, 1 and 2 ControlNets, of the controlnets section.
        control_warm_s: seconds in which its capacity is measured, and each kind of steps.
        flood_calls: of the other client beside each flood, of each way to call.
        flood_phase_s: of each phase of the flooded-plans section.
    """

    sizes_px: tuple[int, ...] = (64, 96, 128)
    in_flight: tuple[int, ...] = (1, 4, 8, 16)
    num_steps: int = NUM_STEPS
    rounds: int = 5
    stream_requests: int = 18
    step_rounds: int = 40
    size_rounds: int = 15
    family_rounds: int = 25
    kernel_rounds: int = 60
    short_requests: int = 100
    long_requests: int = 40
    throughput_rounds: int = 4
    replica_counts: tuple[int, ...] = (1, 2)
    dispatcher_replicas: tuple[int, ...] = (1, 8, 64, 512)
    dispatcher_s: float = 5.0
    dispatcher_depth: int = 1000
    dispatcher_image_s: float = 2.0
    load_clients: int = 64
    load_s: float = 300.0
    load_sample_s: float = 10.0
    cascade_prompts: int = 300
    cascade_load_s: float = 40.0
    lora_count: int = 200
    lora_calls: int = 300
    lora_warm_s: float = 16.0
    lora_rounds: int = 8
    lora_cold: int = 4
    control_calls: int = 600
    control_warm_s: float = 12.0
    flood_calls: int = 34
    flood_phase_s: float = 30.0


def quick_settings() -> Settings:
    """Return settings of a minute or two that only show that everything works."""
    return Settings(
        sizes_px=(64,),
        in_flight=(1, 4),
        num_steps=3,
        rounds=1,
        stream_requests=4,
        step_rounds=4,
        size_rounds=2,
        family_rounds=3,
        kernel_rounds=3,
        short_requests=6,
        long_requests=2,
        throughput_rounds=1,
        replica_counts=(1,),
        dispatcher_replicas=(1, 8),
        dispatcher_s=0.3,
        dispatcher_depth=50,
        dispatcher_image_s=0.2,
        load_s=20.0,
        load_sample_s=2.0,
        cascade_prompts=12,
        cascade_load_s=4.0,
        lora_count=12,
        lora_calls=16,
        lora_warm_s=2.0,
        lora_rounds=2,
        lora_cold=1,
        control_calls=16,
        control_warm_s=1.0,
        flood_calls=3,
        flood_phase_s=10.0,
    )
