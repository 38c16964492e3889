"""The LoRAs that a call names, in ``loras`` or in its model's name, and when they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.api.advice import wrong
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import model_not_found, not_found
from ray_cluster.api.input.schemas import MAX_LORAS, ImageGenerationRequest
from ray_cluster.api.resolve.fidelity import check_unmeasured
from ray_cluster.config.sections.loras import LORA_NAME
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
    fields: ImageGenerationRequest,
    loras: Sequence[BasedLora],
    profile: ModelProfile,
    requests: tuple[ImageRequest, ...],
) -> tuple[ImageRequest, ...]:
    """Return a call's requests with its LoRAs, and with the number of steps before these start.

    That number follows from the call and the settings alone: the same call makes the same image,
    however long its LoRAs take to arrive.

    Args:
        profile: what :func:`beside_loras` returned, of which the requests were made.

    Raises:
        InvalidRequest: a LoRA is made for another model, or would start after the last step.
    """
    for one in loras:
        if one.base != profile.model:
            raise wrong(
                "loras",
                f"names {one.use.name!r}, which is made for {one.base}, and this image is made by "
                f"{profile.model}",
                more=f"Set 'model' to {one.base!r}, or choose a LoRA of {profile.model}.",
                code="lora_of_another_model",
            )
    if not loras:
        return requests
    start = _start_step(fields, requests[0].num_steps, profile)
    add_ons = AddOns(loras=tuple(one.use for one in loras), lora_start_step=start)
    return tuple(replace(one, add_ons=add_ons) for one in requests)


def beside_loras(
    fields: ImageGenerationRequest, loras: Sequence[BasedLora], profile: ModelProfile
) -> ModelProfile:
    """Return what a model accepts of a call beside these LoRAs.

    Raises:
        InvalidRequest: the call asks for a fidelity that is not offered with LoRAs, or says when
            LoRAs start and names none.
    """
    if not loras:
        if fields.lora_start_step is not None:
            raise wrong("lora_start_step", "changes nothing without LoRAs", "names loras")
        return replace(profile, lora_start=None)
    mode = fields.fidelity or "exact"
    is_late = profile.lora_start is not None and profile.lora_start.share(mode) is not None
    # under load, fewer steps yet: what images lose by that is not known at all
    checked = fields.model_copy(update={"fidelity": None}) if is_late else fields
    check_unmeasured(checked, "without LoRAs", "an image with them")
    if not is_late:
        return replace(profile, fewer_steps=None)
    if fields.lora_start_step is not None:
        what = f"and 'fidelity' ({mode}) both say when LoRAs start"
        raise wrong("lora_start_step", what, "leave one out")
    return profile


def _start_step(fields: ImageGenerationRequest, num_steps: int, profile: ModelProfile) -> int:
    mode = fields.fidelity or "exact"
    share = None if profile.lora_start is None else profile.lora_start.share(mode)
    start = fields.lora_start_step or 0 if share is None else int(share * num_steps)
    if start >= num_steps:
        what = f"must be less than the steps of the image, {num_steps}; given {start}"
        raise wrong("lora_start_step", what, "start")
    return start


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
                where = "which 'model' names, too, at scale 1" if one.name == of_model else "twice"
                raise wrong("loras", f"names {one.name!r}, {where}", "each lora")
            scales[one.name] = one.weight
        if not scales:
            return fields, ()
        if len(scales) > MAX_LORAS:
            what = f"and 'model' name {len(scales)} LoRAs together; at most {MAX_LORAS} are allowed"
            raise wrong("loras", what, more="Leave some out.")
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
        hint = _hint([repr(one) for one in found.near.get(name, ())])
        what = f"names the LoRA {name!r}, which does not exist"
        raise wrong(param, what, more=hint, code="lora_not_found")
    if status.state == "failed" and status.is_permanent:
        what = f"names the LoRA {name!r}, which cannot be used: {status.reason}"
        raise wrong(param, what, "file of lora", code="lora_unusable")
    return status


def _hint(near: Sequence[str]) -> str:
    """Return what to do about a name that there is not."""
    listed = "GET /v1/loras lists all."
    return f"Did you mean {' or '.join(near)}? {listed}" if near else listed
