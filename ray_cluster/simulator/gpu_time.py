"""GPUs of a simulated cluster: who holds which, and for how long altogether."""

from __future__ import annotations

import heapq


class GpuPool:
    """GPUs of one type. None is ever held twice at once.

    Args:
        num_gpus: that there are.
    """

    def __init__(self, num_gpus: int) -> None:
        self._free = list(range(num_gpus))
        self._broken: set[int] = set()
        self._held_since: dict[int, float] = {}
        self._num_gpus = num_gpus
        self._held_s = 0.0

    @property
    def num_working(self) -> int:
        """GPUs that are not broken."""
        return self._num_gpus - len(self._broken)

    @property
    def num_free(self) -> int:
        """GPUs that can be taken."""
        return len(self._free)

    def held_s(self, now_s: float) -> float:
        """Return the GPU-seconds for which GPUs were held."""
        return self._held_s + sum(now_s - since_s for since_s in self._held_since.values())

    def take(self, count: int, now_s: float) -> tuple[int, ...]:
        """Take free GPUs, of which there must be enough."""
        assert count <= len(self._free)
        taken = tuple(heapq.heappop(self._free) for _ in range(count))
        for gpu in taken:
            assert gpu not in self._held_since, f"GPU {gpu} is held twice"
            self._held_since[gpu] = now_s
        return taken

    def give_back(self, gpus: tuple[int, ...], now_s: float) -> None:
        """Have GPUs be free again, but for those that are broken."""
        for gpu in gpus:
            self._held_s += now_s - self._held_since.pop(gpu)
            if gpu not in self._broken:
                heapq.heappush(self._free, gpu)

    def break_down(self, gpu: int) -> None:
        """Have a GPU that is held be of no use once it is given back."""
        assert gpu in self._held_since
        self._broken.add(gpu)

    def repair(self, gpu: int) -> None:
        """Have a broken GPU be free."""
        self._broken.remove(gpu)
        heapq.heappush(self._free, gpu)
