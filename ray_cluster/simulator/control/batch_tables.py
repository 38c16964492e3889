"""Batches of whole images, and their seconds, from latency tables."""

from __future__ import annotations

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.costs.latency import LatencyProfile


def image_options(profile: LatencyProfile, batching_gain: float = 1.0) -> tuple[BatchOption, ...]:
    """Return the batches of a table of whole images of one size; see `with_gain`.

    Raises:
        ValueError: it has other images, or none.
    """
    found = [(row.key.batch, row.seconds) for row in profile.of("image")]
    return with_gain(_checked(found, profile, "whole images of one size"), batching_gain)


def step_options(
    profile: LatencyProfile, *, steps: int, side_px: int, batching_gain: float = 1.0
) -> tuple[BatchOption, ...]:
    """Return batches of square images that are so many steps of a table.

    Raises:
        ValueError: it has no such steps.
    """
    found = [
        (row.key.batch, steps * row.seconds)
        for row in profile.of("step")
        if (row.key.width_px, row.key.height_px) == (side_px, side_px) and not row.key.beside
    ]
    return with_gain(_checked(found, profile, f"steps of {side_px} px"), batching_gain)


def with_gain(options: tuple[BatchOption, ...], batching_gain: float) -> tuple[BatchOption, ...]:
    """Return batches whose saving against single images is multiplied by the gain.

    Larger batches never end sooner, however large the gain.
    """
    single_s, changed = options[0].seconds, list[BatchOption]()
    for one in options:
        alone_s = one.batch * single_s
        seconds = alone_s - batching_gain * (alone_s - one.seconds)
        least_s = changed[-1].seconds if changed else 0.0
        changed.append(BatchOption(one.batch, max(seconds, least_s)))
    return tuple(changed)


def _checked(
    found: list[tuple[int, float]], profile: LatencyProfile, what: str
) -> tuple[BatchOption, ...]:
    """Each batch once, from 1."""
    batches = sorted(batch for batch, _ in found)
    if not batches:
        raise ValueError(
            f"given {profile.name!r}, which has no {what}; allowed: profiles that have some, or, "
            "of steps, a workload that says how many `steps` of which `side_px`"
        )
    if batches[:1] != [1] or len(set(batches)) < len(batches):
        raise ValueError(
            f"given {profile.name!r}, whose batches of {what} are {batches}; allowed: profiles "
            "that have each batch once, from 1"
        )
    return tuple(BatchOption(batch, seconds) for batch, seconds in sorted(found))
