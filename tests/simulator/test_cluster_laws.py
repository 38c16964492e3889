"""Whatever plans, failures and loads a cluster meets, it keeps the laws and loses nothing."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.planning.plan import CascadePlan, LateAnswer, PlannedSettings
from ray_cluster.simulator.control.cluster import SimulatedCluster
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.events import EventQueue
from tests.examples import a_few
from tests.simulator.checked_cluster import ClusterOverseer
from tests.simulator.clusters import job, simulated

NUM_GPUS = 4
CAPS = st.tuples(st.integers(1, 4), st.integers(1, 2))


class Story:
    """A cluster to which things happen one after the other."""

    def __init__(self, seed: int, faults: Faults | None) -> None:
        self.overseer = ClusterOverseer()
        self.cluster: SimulatedCluster
        self.events: EventQueue
        self.cluster, self.events = simulated(
            NUM_GPUS, noise_cv=0.3, faults=faults, seed=seed, watch=self.overseer
        )
        self.overseer.cluster = self.cluster
        self.num_offered = self.num_turned = 0

    def scale(self, num_light: int, num_heavy: int) -> None:
        self.cluster.scale("light", num_light)
        self.cluster.scale("heavy", num_heavy)

    def apply(self, caps: tuple[int, int], plan: CascadePlan) -> None:
        self.num_turned += 1
        most = self.overseer.most_by_pool
        for pool, cap in zip(("light", "heavy"), caps, strict=True):
            most[pool] = max(most[pool], cap)
        both = (("light", caps[0]), ("heavy", caps[1]))
        self.cluster.apply(PlannedSettings(self.num_turned, both, (plan,)))

    def offer(self, confidences: list[float], slo_s: float) -> None:
        for confidence in confidences:
            self.cluster.offer(job(self.events.now_s, confidence, slo_s))
            self.num_offered += 1

    def wait(self, seconds: float) -> None:
        self.events.run(self.events.now_s + seconds)
        self.overseer.check(self.num_offered)


Act = Callable[[Story], None]


def plan_of(
    threshold: float, share: float, *, when_late: LateAnswer, has_slack: bool
) -> CascadePlan:
    return CascadePlan(
        "s",
        threshold,
        routing="random" if share else "confidence",
        heavy_share=share,
        reserve_s=1.0 if has_slack else None,
        when_late=when_late,
    )


def scales(numbers: tuple[int, int]) -> Act:
    return lambda story: story.scale(*numbers)


def turns(caps: tuple[int, int], plan: CascadePlan) -> Act:
    return lambda story: story.apply(caps, plan)


def offers(confidences: list[float], slo_s: float) -> Act:
    return lambda story: story.offer(confidences, slo_s)


def waits(seconds: float) -> Act:
    return lambda story: story.wait(seconds)


plans = st.builds(
    plan_of,
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    when_late=st.sampled_from(["light", "drop"]),
    has_slack=st.booleans(),
)
acts = st.one_of(
    st.builds(scales, st.tuples(st.integers(0, NUM_GPUS), st.integers(0, NUM_GPUS))),
    st.builds(turns, CAPS, plans),
    st.builds(
        offers,
        st.lists(st.floats(0, 1), min_size=1, max_size=12),
        st.sampled_from([1.0, 5.0, 20.0, 60.0]),
    ),
    st.builds(waits, st.sampled_from([0.0, 0.7, 3.0, 25.0])),
)
faults = st.sampled_from([None, Faults(40.0, 5.0), Faults(150.0, 30.0)])


@a_few  # each is a simulated run
@given(st.integers(0, 99), faults, st.lists(acts, min_size=5, max_size=40))
def test_every_request_comes_to_one_end_whatever_happens(
    seed: int, faults: Faults | None, acts: list[Act]
) -> None:
    story = Story(seed, faults)
    story.scale(2, 2)
    story.apply((4, 2), CascadePlan("s", 0.5))
    story.wait(60.0)
    for act in acts:
        act(story)
        story.overseer.check(story.num_offered)
    story.scale(2, 2)
    for _ in range(60):
        story.wait(20.0)
    assert story.cluster.cell.num_open == 0
    assert len(story.cluster.fates) == story.num_offered


def test_a_story_with_failures_makes_images_that_it_has_to_make_again() -> None:
    story = Story(1, Faults(40.0, 5.0))
    story.scale(2, 2)
    story.apply((4, 2), CascadePlan("s", 0.5))
    for number in range(200):
        story.offer([number % 10 / 10], 60.0)
        story.wait(2.0)
    story.wait(600.0)
    totals = dict(story.cluster.cell.core.snapshot(0.0).totals)
    assert totals["requeued"] > 0
    assert len(story.overseer.runs) > 50
    assert story.cluster.cell.num_open == 0
