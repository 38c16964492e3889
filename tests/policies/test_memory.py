from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.memory import (
    MIB,
    ActivationCost,
    MemoryNeed,
    MemoryPlan,
    plan_memory,
)

SMALL, LARGE = (512, 512), (1024, 1024)
NEED = MemoryNeed(
    weights_bytes=1000 * MIB,
    encoder_bytes=200 * MIB,
    pinned_weights_bytes=400 * MIB,
    activation_by_size={
        SMALL: ActivationCost(50 * MIB, 25 * MIB),
        LARGE: ActivationCost(100 * MIB, 100 * MIB),
    },
)


def plan(budget_mib: int, *, max_batch: int = 8, can_offload: bool = True) -> MemoryPlan:
    return plan_memory(
        NEED, budget_bytes=budget_mib * MIB, max_batch=max_batch, can_offload=can_offload
    )


def test_everything_fits_into_a_large_budget() -> None:
    roomy = plan(1900)
    assert roomy.verdict == "fits"
    assert roomy.explanation.count("fits") == 1, "said twice"
    assert roomy.max_batch_by_size == {SMALL: 8, LARGE: 8}
    assert roomy.weights_bytes == 1000 * MIB


def test_one_byte_too_few_caps_the_batch_of_the_large_size_only() -> None:
    tight = plan_memory(NEED, budget_bytes=1900 * MIB - 1, max_batch=8, can_offload=True)
    assert tight.verdict == "capped"
    assert tight.max_batch_by_size == {SMALL: 8, LARGE: 7}
    assert "7 at 1024x1024" in tight.explanation
    assert "1900 MiB (memory_gib)" in tight.explanation


def test_smaller_batches_are_preferred_to_offloading() -> None:
    assert plan(1200).verdict == "capped"
    assert plan(1200).max_batch_by_size == {SMALL: 6, LARGE: 1}


def test_the_text_encoders_are_offloaded_first_and_all_weights_where_that_is_not_enough() -> None:
    first, whole = plan(1199), plan(999)
    assert (first.verdict, first.offloaded) == ("offload", "text encoders")
    assert (first.weights_bytes, first.host_bytes) == (800 * MIB, 200 * MIB)
    assert first.max_batch_by_size == {SMALL: 8, LARGE: 2}
    assert "800 MiB with the text encoders offloaded" in first.explanation
    assert (whole.verdict, whole.offloaded) == ("offload", "all")
    assert (whole.weights_bytes, whole.host_bytes) == (400 * MIB, 600 * MIB)
    assert whole.max_batch_by_size == {SMALL: 8, LARGE: 4}


def test_a_cuda_context_takes_its_part_of_the_budget() -> None:
    need = replace(NEED, context_bytes=100 * MIB)
    roomy, tight = (
        plan_memory(need, budget_bytes=budget, max_batch=8, can_offload=False)
        for budget in (2000 * MIB, 2000 * MIB - 1)
    )
    assert (roomy.verdict, tight.verdict) == ("fits", "capped")
    assert roomy.peak_bytes == 2000 * MIB
    assert "100 MiB of CUDA context" in roomy.explanation
    assert (roomy.spare_bytes, tight.spare_bytes > 0) == (0, True)


def test_what_is_left_beside_the_largest_batch_is_spare() -> None:
    roomy = plan(2000)
    assert roomy.verdict == "fits"
    assert roomy.spare_bytes == 2000 * MIB - roomy.peak_bytes > 0
    assert plan(500).spare_bytes == 0


def test_it_is_refused_when_offloading_is_not_allowed_and_says_what_to_change() -> None:
    refused = plan(1199, can_offload=False)
    assert refused.verdict == "refused"
    assert refused.max_batch_by_size[LARGE] == 0
    for part in ("1199 MiB", "1200 MiB (memory_gib)", "1024x1024", "max_px", "offload"):
        assert part in refused.explanation


def test_it_is_refused_when_even_offloading_does_not_help() -> None:
    refused = plan(500)
    assert refused.verdict == "refused"
    assert "600 MiB" in refused.explanation
    assert "or allow offload" not in refused.explanation


sizes_bytes = st.integers(0, 60)
needs = st.builds(
    lambda weights, encoders, pinned, costs: MemoryNeed(
        weights, costs, min(encoders, weights), min(pinned, weights - min(encoders, weights))
    ),
    sizes_bytes,
    sizes_bytes,
    sizes_bytes,
    st.dictionaries(
        st.sampled_from([SMALL, LARGE, (64, 32)]),
        st.builds(ActivationCost, st.integers(0, 20), st.integers(0, 10)),
        min_size=1,
    ),
)


@given(needs, st.integers(0, 120), st.integers(1, 8), st.booleans())
def test_plan_equals_trying_every_batch(
    need: MemoryNeed, budget: int, max_batch: int, can_offload: bool
) -> None:
    decided = plan_memory(need, budget_bytes=budget, max_batch=max_batch, can_offload=can_offload)

    def largest(weights: int) -> dict[tuple[int, int], int]:
        return {
            size: max([b for b in range(1, max_batch + 1) if weights + c.at(b) <= budget] or [0])
            for size, c in need.activation_by_size.items()
        }

    resident, first, offloaded = (
        largest(need.resident_bytes(which)) for which in ("nothing", "text encoders", "all")
    )
    if min(resident.values()) == max_batch:
        assert (decided.verdict, decided.max_batch_by_size) == ("fits", resident)
    elif min(resident.values()) >= 1:
        assert (decided.verdict, decided.max_batch_by_size) == ("capped", resident)
    elif can_offload and min(first.values()) >= 1:
        assert (decided.verdict, decided.max_batch_by_size) == ("offload", first)
        assert decided.offloaded == "text encoders"
    elif can_offload and min(offloaded.values()) >= 1:
        assert (decided.verdict, decided.max_batch_by_size) == ("offload", offloaded)
    else:
        assert decided.verdict == "refused"
    if decided.verdict != "refused":
        used = [
            decided.weights_bytes + need.activation_by_size[size].at(batch)
            for size, batch in decided.max_batch_by_size.items()
        ]
        assert max(used) <= budget
    assert decided.explanation.startswith(decided.verdict)
