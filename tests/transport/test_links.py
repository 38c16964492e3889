"""Every kind of link carries the same messages, waits for room, and ends for both sides."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ray_cluster.transport.links import (
    MAX_FRAMES,
    MAX_HEAD_BYTES,
    Link,
    LinkClosed,
    LinkKind,
    LinkLimits,
)
from tests.transport.harness import BETWEEN_PROCESSES, KINDS, SMALL, Sending, ends, noise, read_all

pytestmark = pytest.mark.parametrize("kind", KINDS)
SIZES = (0, 1, 63, 64, 65, 4096, 1_000_001)


def test_heads_and_frames_come_as_they_were_sent(kind: LinkKind) -> None:
    frames = [noise(size, seed) for seed, size in enumerate(SIZES)]
    with ends(kind) as (here, there):
        for one, other in ((here, there), (there, here)):
            one.send(b"head", frames)
            one.send(b"")
            message, empty = other.receive(), other.receive()
            assert message.head == b"head"
            assert [one.tobytes() for one in message.frames] == [one.tobytes() for one in frames]
            assert not any(one.flags.writeable for one in message.frames)
            assert (empty.head, empty.frames) == (b"", ())
            message.release()
            empty.release()


def test_what_is_sent_may_change_afterwards(kind: LinkKind) -> None:
    frame = noise(100_000)
    before = frame.tobytes()
    with ends(kind) as (here, there):
        here.send(b"", [frame])
        frame[:] = 0
        assert there.receive().frames[0].tobytes() == before


def test_a_message_stays_as_it_is_until_it_is_released(kind: LinkKind) -> None:
    with ends(kind, SMALL) as (here, there):
        here.send(b"", [noise(300_000, 1)])
        first = there.receive()
        for seed in range(20):
            here.send(b"", [noise(300_000, seed)])
            there.receive().release()
        assert first.frames[0].tobytes() == noise(300_000, 1).tobytes()
        # once too often does no harm to others
        first.release()
        first.release()
        here.send(b"", [noise(300_000, 2)])
        second = there.receive()
        here.send(b"", [noise(300_000, 3)])
        assert second.frames[0].tobytes() == noise(300_000, 2).tobytes()


def test_both_ends_send_from_several_threads_far_more_than_there_is_room_for(
    kind: LinkKind,
) -> None:
    count, threads = 60, 2

    def send(link: Link, first: int) -> None:
        rng = np.random.default_rng(first)
        for number in range(first, first + count):
            sizes = rng.integers(0, 300_000, 3)
            link.send(str(number).encode(), [noise(int(size), number) for size in sizes])

    def read(link: Link, found: list[int]) -> None:
        for _ in range(threads * count):
            message = link.receive()
            number = int(message.head)
            assert all(
                one.tobytes() == noise(one.nbytes, number).tobytes() for one in message.frames
            )
            found.append(number)
            message.release()

    with ends(kind, SMALL) as pair:
        found: tuple[list[int], list[int]] = ([], [])
        work = [
            Sending(lambda link=link, first=first: send(link, first))
            for link in pair
            for first in (0, 1000)
        ]
        work += [
            Sending(lambda link=link, own=own: read(link, own))
            for link, own in zip(pair, found, strict=True)
        ]
        assert all(one.is_done_within() and one.error is None for one in work)
        for own in found:
            assert sorted(own) == [*range(count), *range(1000, 1000 + count)]
            # of one thread in its order
            assert [one for one in own if one < 1000] == list(range(count))
        assert pair[0].traffic.num_sent == pair[1].traffic.num_received == threads * count
        assert pair[0].traffic.sent_bytes == pair[1].traffic.received_bytes > 0


def test_who_waits_in_a_link_hears_that_either_side_closes_it(kind: LinkKind) -> None:
    for closing in (0, 1):
        with ends(kind, SMALL) as pair:
            waiting = [Sending(link.receive) for link in pair]
            full = threading.Event()

            def fill(link: Link = pair[0], full: threading.Event = full) -> None:
                while True:
                    link.send(b"x" * 60_000, [noise(1_000_000)])
                    full.set()

            filling = Sending(fill)
            assert full.wait(30)
            pair[closing].close()
            pair[closing].close()
            for one in (*waiting, filling):
                assert one.is_done_within()
            assert isinstance(filling.error, LinkClosed)
            for link in pair:
                with pytest.raises(LinkClosed):
                    read_all(link)
                with pytest.raises(LinkClosed):
                    link.send(b"")


def test_a_message_beyond_the_bounds_is_refused_and_harms_nothing(kind: LinkKind) -> None:
    with ends(kind, SMALL) as (here, there):
        too_many = SMALL.max_message_bytes + 1
        for head, frames in (
            (b"", [noise(too_many)]),
            (b"x" * (MAX_HEAD_BYTES + 1), []),
            (b"", [noise(1)] * (MAX_FRAMES + 1)),
            (b"", [noise(10)[::2]]),
            (b"", [noise(16).view(np.float32)]),
        ):
            with pytest.raises(ValueError, match=r"at most|flat"):
                here.send(head, frames)  # type: ignore[arg-type]
        here.send(b"x" * MAX_HEAD_BYTES, [noise(1)] * (MAX_FRAMES - 1) + [noise(too_many - 256)])
        assert len(there.receive().frames) == MAX_FRAMES


def test_the_smaller_ends_limits_hold(kind: LinkKind) -> None:
    if kind not in BETWEEN_PROCESSES:
        pytest.skip("both ends of a link within a process have the same limits")
    with ends(kind, LinkLimits(1000, 2000)) as (here, _):
        with pytest.raises(ValueError, match="at most 1000"):
            here.send(b"", [noise(1001)])
        here.send(b"", [noise(1000)])


def test_a_send_waits_for_room_and_goes_on_when_there_is_some(kind: LinkKind) -> None:
    if kind == "tcp":
        pytest.skip("the receiver's memory is its own")
    with ends(kind, SMALL) as (here, there):
        kept = []
        for _ in range(2):
            here.send(b"", [noise(2**20)])
            kept.append(there.receive())
        third = Sending(lambda: here.send(b"third", [noise(2**20, 3)]))
        assert not third.is_done_within(0.3)
        kept[0].release()
        assert third.is_done_within()
        message = there.receive()
        assert message.frames[0].tobytes() == noise(2**20, 3).tobytes()
        assert kept[1].frames[0].tobytes() == noise(2**20).tobytes()
