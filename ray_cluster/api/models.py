"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.replies import FewerStepsCard, ModelCard, ModelList, StepsByFidelity
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.requests import ModelProfile


class ModelsEndpoint:
    """Tells which models are ready, and what each can do."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def list(self) -> ModelList:
        """List the models that a replica has registered, in the configuration's order."""
        profiles = await self._catalog.refresh()
        names = [name for name in self._catalog.known if name in profiles]
        return ModelList(data=[_fields(profiles[name]) for name in names])

    async def retrieve(self, model: str) -> ModelCard:
        """Describe one model: 404 for an unknown one, 503 for one that has not registered yet."""
        return _fields(await self._catalog.profile(model))


def _fields(profile: ModelProfile) -> ModelCard:
    table = profile.fewer_steps
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
        fewer_steps=None if table is None else _table(table),
    )


def _table(table: StepTable) -> FewerStepsCard:
    rows = [_row(row) for row in table.rows]
    return FewerStepsCard.model_validate(
        {
            "sampler": table.sampler,
            "max_guidance_scale": table.max_guidance_scale,
            "steps": rows,
        }
    )


def _row(row: FewerSteps) -> StepsByFidelity:
    balanced, fast = row.balanced_reuse, row.fast_reuse
    return StepsByFidelity(
        asked=row.asked,
        balanced=row.balanced if balanced is None else balanced.num_steps,
        fast=row.fast if fast is None else fast.num_steps,
        balanced_reuse=None if balanced is None else str(balanced.schedule),
        fast_reuse=None if fast is None else str(fast.schedule),
    )
