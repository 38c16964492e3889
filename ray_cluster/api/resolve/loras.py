"""The LoRAs that a call names, in ``loras`` or in the name of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import model_not_found, not_found
from ray_cluster.api.input.lora_schema import MAX_LORAS
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.config.sections.loras import LORA_NAME
from ray_cluster.errors import InvalidRequest
from ray_cluster.protocol.dispatcher import LoraCalls
from ray_cluster.protocol.loras import LoraLookup, LoraStatus
from ray_cluster.requests import AddOns, ImageRequest, LoraUse, ModelProfile

_SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class BasedLora:
    """A LoRA of a call, and the model that it is made for."""

    use: LoraUse
    base: str


def with_loras(
    requests: Sequence[ImageRequest], loras: Sequence[BasedLora], profile: ModelProfile
) -> tuple[ImageRequest, ...]:
    """Return the requests with LoRAs.

    Raises:
        InvalidRequest: one is made for another model.
    """
    for one in loras:
        if one.base != profile.model:
            raise InvalidRequest(
                f"The parameter 'loras' names {one.use.name!r}, which is made for {one.base}, and "
                f"this image is made by {profile.model}. Set 'model' to {one.base!r}, or choose "
                f"a LoRA of {profile.model}.",
                "loras",
                "lora_of_another_model",
            )
    add_ons = AddOns(loras=tuple(one.use for one in loras))
    return tuple(replace(one, add_ons=add_ons) for one in requests) if loras else tuple(requests)


class LoraResolver:
    """Finds the LoRAs that calls name."""

    def __init__(self, client: LoraCalls, catalog: Catalog) -> None:
        self._client = client
        self._catalog = catalog

    async def resolve(
        self, fields: ImageGenerationRequest
    ) -> tuple[ImageGenerationRequest, tuple[BasedLora, ...]]:
        """Return a call's fields with its base as the model, and its LoRAs.

        Raises:
            ApiError: 404, its model's name names a LoRA that there is not.
            InvalidRequest: a LoRA is named twice, unknown, or cannot be had.
        """
        base, of_model = await self._split(fields.model)
        scales = dict(() if of_model is None else [(of_model, 1.0)])
        for one in fields.loras or ():
            if one.name in scales:
                raise _named_twice(one.name, is_model=one.name == of_model)
            scales[one.name] = one.weight
        if not scales:
            return fields, ()
        if len(scales) > MAX_LORAS:
            raise InvalidRequest(
                f"The parameters 'loras' and 'model' name {len(scales)} LoRAs together; at most "
                f"{MAX_LORAS} are allowed. Leave some out.",
                "loras",
            )
        found = await self._client.find_loras(tuple(scales))
        if of_model is not None:
            self._check_model(str(base), of_model, found)
        statuses = {name: _checked(name, found, is_model=name == of_model) for name in scales}
        loras = tuple(
            BasedLora(LoraUse(name, scale, statuses[name].lora.lora_id), statuses[name].lora.base)
            for name, scale in scales.items()
        )
        return fields.model_copy(update={"model": base}), loras

    async def _split(self, model: str | None) -> tuple[str | None, str | None]:
        """Return the base and the LoRA that a model's name consists of, if it does."""
        if model is None or _SEPARATOR not in model or model in self._catalog.known:
            return model, None
        base, _, name = model.rpartition(_SEPARATOR)
        if base not in self._catalog.known:
            await self._catalog.refresh()
        known = self._catalog.known
        if model in known or base not in known:
            # what is wrong with it is reported with the model's profile
            return model, None
        if LORA_NAME.fullmatch(name) is None:
            raise model_not_found(model, known)
        return base, name

    def _check_model(self, base: str, name: str, found: LoraLookup) -> None:
        """Raise 404 for a base and a LoRA that do not make a model."""
        status = _status(name, found)
        wanted = f"{base}{_SEPARATOR}{name}"
        if status is None:
            named = [repr(f"{base}{_SEPARATOR}{one}") for one in found.near.get(name, ())]
            why = f"there is no LoRA {name!r}. {_hint(named)}"
        elif status.lora.base not in self._models_of(base):
            meant = f"{status.lora.base}{_SEPARATOR}{name}"
            why = f"the LoRA {name!r} is made for {status.lora.base}. Did you mean {meant!r}?"
        else:
            return
        message = f"The model {wanted!r} does not exist: {why}"
        raise not_found(message, "model_not_found", "model")

    def _models_of(self, name: str) -> set[str]:
        """Return the models that a model's or cascade's name stands for."""
        parts = [(one.light, one.heavy) for one in self._catalog.cascades if one.name == name]
        return {name, *(part for pair in parts for part in pair)}


def _status(name: str, found: LoraLookup) -> LoraStatus | None:
    """Return a LoRA that calls may name; None if there is none."""
    status = found.found.get(name)
    return None if status is None or status.state == "removing" else status


def _checked(name: str, found: LoraLookup, *, is_model: bool) -> LoraStatus:
    status, param = _status(name, found), "model" if is_model else "loras"
    if status is None:
        raise InvalidRequest(
            f"The parameter {param!r} names the LoRA {name!r}, which does not exist. "
            f"{_hint([repr(one) for one in found.near.get(name, ())])}",
            param,
            "lora_not_found",
        )
    if status.state == "failed" and status.is_permanent:
        raise InvalidRequest(
            f"The parameter {param!r} names the LoRA {name!r}, which cannot be used: "
            f"{status.reason}. Leave it out, or have it registered anew from a file that can.",
            param,
            "lora_unusable",
        )
    return status


def _hint(near: Sequence[str]) -> str:
    """Return what to do about a name that there is not."""
    listed = "GET /v1/loras lists all."
    return f"Did you mean {' or '.join(near)}? {listed}" if near else listed


def _named_twice(name: str, *, is_model: bool) -> InvalidRequest:
    where = "which 'model' names, too, at scale 1" if is_model else "a second time"
    return InvalidRequest(
        f"The parameter 'loras' names {name!r}, {where}; name each LoRA once, with the scale that "
        "it is to have.",
        "loras",
    )
