"""``GET /v1/models``: the models that are ready, the cascades, and LoRAs by their bases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from starlette.responses import Response

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.output.resource_schemas import (
    CascadeParts,
    FewerStepsCard,
    LoraModelCard,
    ModelCard,
    ModelList,
    StepsByFidelity,
    UpscaleCard,
)
from ray_cluster.api.resolve.references import max_input_images, max_masked_input_images
from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.loras import LORA_NAME
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.protocol.dispatcher import LoraCalls
from ray_cluster.protocol.loras import MAX_LORAS_AT_ONCE, Lora, LoraStatus
from ray_cluster.requests import ModelProfile


class ModelsEndpoint:
    """Lists the models that are ready, and what each can do."""

    def __init__(self, catalog: Catalog, loras: LoraCalls) -> None:
        self._catalog = catalog
        self._loras = loras
        self._reading = asyncio.Lock()
        self._num_begun = 0
        self._read: Sequence[Lora] | None = None

    async def list(self) -> Response:
        """List the models that a replica has registered, in the configuration's order; after them
        each with its LoRAs, by name.
        """
        profiles = await self._catalog.refresh()
        cards: list[ModelCard | LoraModelCard] = [
            self._card(profiles[name]) for name in self._catalog.known if name in profiles
        ]
        cards += [
            _cascade_card(one, self._card(profiles[one.heavy]))
            for one in self._catalog.cascades
            if one.light in profiles and one.heavy in profiles
        ]
        cards += [_lora_card(one) for one in await self._usable() if one.base in profiles]
        # of thousands, FastAPI would check each once more
        content = ModelList.model_construct(data=cards).model_dump_json()
        return Response(content, media_type="application/json")

    async def retrieve(self, model: str) -> ModelCard | LoraModelCard:
        """Describe one model: 404 for an unknown one, 503 for one that has not registered yet."""
        for cascade in self._catalog.cascades:
            if cascade.name == model:
                await self._catalog.profile(cascade.light)
                return _cascade_card(
                    cascade, self._card(await self._catalog.profile(cascade.heavy))
                )
        base, _, name = model.rpartition(":")
        if LORA_NAME.fullmatch(name) and model not in self._catalog.known:
            status = (await self._loras.find_loras((name,))).found.get(name)
            profiles = await self._catalog.refresh()
            if status is not None and status.lora.base == base in profiles and _is_usable(status):
                return _lora_card(status.lora)
        return self._card(await self._catalog.profile(model))

    async def _usable(self) -> Sequence[Lora]:
        """Return all LoRAs that calls may name.

        Thousands take many calls to the dispatcher: who comes while they are read shares the next
        reading with all others who do.
        """
        came = self._num_begun
        async with self._reading:
            if self._num_begun == came or self._read is None:
                self._num_begun, self._read = self._num_begun + 1, None
                pages = [page async for page in lora_pages(self._loras)]
                self._read = [one.lora for page in pages for one in page if _is_usable(one)]
            return self._read

    def _card(self, profile: ModelProfile) -> ModelCard:
        names = [one.name for one in self._catalog.controlnets if profile.model in one.bases]
        return _card(profile, names, self._catalog.upscale)


async def lora_pages(
    loras: LoraCalls, after: str = "", most: float = math.inf
) -> AsyncIterator[tuple[LoraStatus, ...]]:
    """Yield LoRAs by name, those after a name, some at a time."""
    while most > 0 and (page := await loras.loras(after, int(min(most, MAX_LORAS_AT_ONCE)))):
        yield page
        if len(page) < min(most, MAX_LORAS_AT_ONCE):
            return
        most -= len(page)
        after = page[-1].lora.name


def _is_usable(status: LoraStatus) -> bool:
    """Whether calls may name a LoRA with its base."""
    return status.state not in {"failed", "removing"}


def _lora_card(lora: Lora) -> LoraModelCard:
    return LoraModelCard.model_construct(
        id=f"{lora.base}:{lora.name}", created=int(lora.added_s), parent=lora.base
    )


def _card(profile: ModelProfile, controlnets: list[str], upscale: UpscaleCard | None) -> ModelCard:
    return ModelCard(
        id=profile.model,
        created=profile.created_s,
        family=profile.family,
        size_multiple_px=profile.size_multiple_px,
        min_px=profile.min_px,
        max_px=profile.max_px,
        default_size=f"{profile.default_width_px}x{profile.default_height_px}",
        max_prompt_tokens=profile.max_prompt_tokens,
        max_steps_by_sampler=dict(profile.max_steps_by_sampler),
        edits=profile.edits,
        engine=profile.engine,
        max_input_images=max_input_images(profile),
        max_masked_input_images=max_masked_input_images(profile),
        needs_image=profile.edits == "masked" or profile.min_references > 0,
        controlnets=controlnets,
        upscale=upscale,
        fewer_steps=None if profile.fewer_steps is None else _steps_card(profile.fewer_steps),
    )


def _cascade_card(cascade: CascadeConfig, heavy: ModelCard) -> ModelCard:
    """Return the card of a cascade: what it takes is what its heavy model takes."""
    return heavy.model_copy(
        update={
            "id": cascade.name,
            "family": "cascade",
            "cascade": CascadeParts(
                light=cascade.light, heavy=cascade.heavy, discriminator=cascade.discriminator
            ),
        }
    )


def _steps_card(table: StepTable) -> FewerStepsCard:
    return FewerStepsCard(
        sampler=table.sampler,
        max_guidance_scale=table.max_guidance_scale,
        steps=[_steps_row(row) for row in table.rows],
    )


def _steps_row(row: FewerSteps) -> StepsByFidelity:
    balanced, fast = row.balanced_reuse, row.fast_reuse
    return StepsByFidelity(
        asked=row.asked,
        balanced=row.balanced if balanced is None else balanced.num_steps,
        fast=row.fast if fast is None else fast.num_steps,
        balanced_reuse=None if balanced is None else str(balanced.schedule),
        fast_reuse=None if fast is None else str(fast.schedule),
    )
