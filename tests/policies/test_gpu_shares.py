from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.gpu_shares import (
    CUDA_CONTEXT_BYTES,
    Card,
    GpuTenants,
    fullest_card,
    replica_bytes,
    tensor_fraction,
)
from ray_cluster.policies.costs.number_formats import default_format

GIB = 1 << 30
CARD = Card(24 * GIB, 24 * GIB, (8, 9))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16"), (None, None)],
)
def test_a_gpu_computes_in_bfloat16_from_the_capability_that_has_it_on(
    capability: tuple[int, int] | None, expected: str | None
) -> None:
    assert default_format("cuda", capability) == expected
    assert default_format("cpu", capability) == "float32"


@pytest.mark.parametrize(
    ("num_gpus", "memory_gib", "expected"),
    [(1, None, 24), (0.5, None, 12), (0.5, 7, 7), (1, 99, 24)],
)
def test_tensors_of_a_replica_and_its_context_are_its_share(
    num_gpus: float, memory_gib: int | None, expected: int
) -> None:
    limit = replica_bytes(CARD, num_gpus, memory_gib and memory_gib * GIB)
    assert limit == expected * GIB
    tensors = tensor_fraction(CARD, limit) * CARD.total_bytes
    assert tensors + CUDA_CONTEXT_BYTES == pytest.approx(expected * GIB)


def test_a_limit_below_the_context_leaves_nothing_for_tensors() -> None:
    assert tensor_fraction(CARD, CUDA_CONTEXT_BYTES - 1) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.2, 0.25, 0.3333, 0.5, 1.0]), st.integers(0, 9), st.integers(1, 3)
        ),
        max_size=3,
    )
)
def test_the_fullest_card_equals_trying_every_set(drawn: list[tuple[float, int, int]]) -> None:
    pools = [GpuTenants(f"p{i}", *one) for i, one in enumerate(drawn)]

    def total(counts: tuple[int, ...]) -> int:
        return sum(n * one.limit_bytes for n, one in zip(counts, pools, strict=True))

    possible = [
        counts
        for counts in product(*(range(one.count + 1) for one in pools))
        if sum(n * one.num_gpus for n, one in zip(counts, pools, strict=True)) <= 1 + 1e-6
    ]
    found = tuple(fullest_card(pools).values())
    assert found in possible
    assert total(found) == max(map(total, possible))
