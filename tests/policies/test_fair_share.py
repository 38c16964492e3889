"""What clients hold of something bounded: nobody is kept out, and all together it has an end."""

from __future__ import annotations

import random
from collections import Counter

from ray_cluster.policies.admission.fair_share import fits

MOST = 60


def test_a_client_alone_may_hold_all() -> None:
    assert fits(MOST, [], MOST)
    assert not fits(MOST + 1, [], MOST)


def test_whatever_others_hold_each_of_k_clients_may_hold_a_kth() -> None:
    for num_clients in range(1, 8):
        others = [10 * MOST] * (num_clients - 1)
        assert fits(MOST // num_clients, others, MOST)
        assert not fits(MOST // num_clients + 1, others, MOST)


def test_clients_that_hold_little_take_no_share_from_others() -> None:
    assert fits(MOST - 10, [1] * 10, MOST)


def test_all_together_never_hold_more_than_the_sum_of_shares() -> None:
    rng = random.Random(47)
    for _ in range(200):
        held: Counter[int] = Counter()
        for _ in range(300):
            client = rng.randrange(6)
            wanted = held[client] + rng.randrange(1, 25)
            if fits(wanted, [num for one, num in held.items() if one != client], MOST):
                held[client] = wanted
            elif rng.random() < 0.3:
                held[client] = rng.randrange(held[client] + 1)
            largest = sorted(held.values(), reverse=True)
            assert all(num <= MOST / rank for rank, num in enumerate(largest, start=1))
