from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.memory import MIB, ActivationCost, MemoryNeed, MemoryPlan, plan_memory

SMALL, LARGE = (512, 512), (1024, 1024)
NEED = MemoryNeed(
    weights_bytes=1000 * MIB,
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


def test_weights_are_offloaded_when_a_size_would_not_run_otherwise() -> None:
    offloaded = plan(1199)
    assert offloaded.verdict == "offload"
    assert offloaded.weights_bytes == 400 * MIB
    assert offloaded.max_batch_by_size == {SMALL: 8, LARGE: 6}


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
    lambda weights, pinned, costs: MemoryNeed(weights, costs, min(pinned, weights)),
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

    resident, offloaded = largest(need.weights_bytes), largest(need.pinned_weights_bytes)
    if min(resident.values()) == max_batch:
        assert (decided.verdict, decided.max_batch_by_size) == ("fits", resident)
    elif min(resident.values()) >= 1:
        assert (decided.verdict, decided.max_batch_by_size) == ("capped", resident)
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
