"""ControlNets in the process of the model that they steer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from ray_cluster.engine.controlnets.asks import ControlNetAsk, ControlNetBackend, RowResiduals
from ray_cluster.engine.controlnets.bank import Bank, BankRow
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.errors import MODEL_ERRORS, RequestFailed


class LocalControlNets:
    """Computes at once what is asked, all rows of a ControlNet in one model call.

    Args:
        banks: by name.
    """

    def __init__(self, banks: Mapping[str, Bank]) -> None:
        self._banks = banks

    @property
    def names(self) -> tuple[str, ...]:
        """The ControlNets that are here."""
        return tuple(self._banks)

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        """Compute; see :meth:`ControlNetBackend.ask`."""
        futures: list[Future[RowResiduals]] = [Future() for _ in asks]
        by_name: defaultdict[str, list[int]] = defaultdict(list)
        for index, one in enumerate(asks):
            by_name[one.name].append(index)
        for name, indices in by_name.items():
            self._answer(name, [(asks[index], futures[index]) for index in indices])
        return futures

    def _answer(
        self, name: str, pairs: Sequence[tuple[ControlNetAsk, Future[RowResiduals]]]
    ) -> None:
        """Fill futures; a call that fails is tried in halves, so that only the culprit fails."""
        try:
            found = self._compute(self._banks[name], [ask for ask, _ in pairs])
        except MODEL_ERRORS as error:
            raise_if_broken(error)
            message = f"ControlNet {name!r}: {type(error).__name__}: {error}"
        else:
            for (_, future), one in zip(pairs, found, strict=True):
                future.set_result(one)
            return
        if len(pairs) == 1:
            pairs[0][1].set_exception(RequestFailed(message, "denoise"))
            return
        middle = len(pairs) // 2
        self._answer(name, pairs[:middle])
        self._answer(name, pairs[middle:])

    def _compute(self, bank: Bank, asks: Sequence[ControlNetAsk]) -> list[RowResiduals]:
        for one in asks:
            if not bank.knows(one.key):
                bank.open(one.key, one.conditioning, one.map)
        # opening one may have dropped another
        if all(bank.knows(one.key) for one in asks):
            return bank.compute([BankRow(one.key, one.latents, one.timestep) for one in asks])
        found = []
        for one in asks:
            if not bank.knows(one.key):
                bank.open(one.key, one.conditioning, one.map)
            found += bank.compute([BankRow(one.key, one.latents, one.timestep)])
        return found

    def call_when_ready(self, _wake: Callable[[], None]) -> None:
        """Do nothing: what is asked is there at once."""

    def forget(self, key: str) -> None:
        """Drop what is kept under a key."""
        for bank in self._banks.values():
            bank.close(key)

    def usual_s(self, _name: str) -> float:
        """Return 0: what is asked is there at once."""
        return 0.0


class SplitControlNets:
    """ControlNets some of which run here, and all others elsewhere.

    Args:
        local: names of those that run here.
    """

    def __init__(
        self, here: ControlNetBackend, elsewhere: ControlNetBackend, local: frozenset[str]
    ) -> None:
        self._here, self._elsewhere, self._local = here, elsewhere, local

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        """Ask the others first: they work while this process does."""
        futures: dict[int, Future[RowResiduals]] = {}
        for controls, is_local in ((self._elsewhere, False), (self._here, True)):
            own = [index for index, one in enumerate(asks) if (one.name in self._local) is is_local]
            if own:
                made = controls.ask([asks[index] for index in own])
                futures |= dict(zip(own, made, strict=True))
        return [futures[index] for index in range(len(asks))]

    def call_when_ready(self, wake: Callable[[], None]) -> None:
        """Pass it on."""
        self._elsewhere.call_when_ready(wake)

    def forget(self, key: str) -> None:
        """Drop what is kept under a key."""
        self._here.forget(key)
        self._elsewhere.forget(key)

    def usual_s(self, name: str) -> float:
        """Return the seconds that an answer usually takes."""
        return (self._here if name in self._local else self._elsewhere).usual_s(name)
