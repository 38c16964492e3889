"""What replies say of a cascade's answer."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ray_cluster.protocol.outcomes import AnswerReason, CascadeAnswer, CascadeStage


class StageCard(BaseModel):
    """What a stage took."""

    stage: CascadeStage
    name: str = Field(description="The model or the discriminator.")
    queue_s: float = Field(description="Seconds until it began, of `took_s`.")
    took_s: float = Field(description="All its seconds.")


class CascadeCard(BaseModel):
    """How a cascade came to its answer."""

    model: str = Field(description="Whose image it is.")
    stage: CascadeStage = Field(description="The stage that made it.")
    reason: AnswerReason = Field(
        description="Why it is of that model: `confident`, `deferred` (its confidence was below "
        "the threshold), `no_time` for the heavy one, `scorer_away`, `heavy_failed`; or why it was "
        "not routed: `quality`, or what the light model does not take."
    )
    confidence: float | None = Field(description="Of the light image; null if none was scored.")
    threshold: float | None = Field(
        description="Below which it was deferred, by the time that was left; null likewise."
    )
    stages: list[StageCard] = Field(description="Those that ended.")


def cascade_card(answer: CascadeAnswer) -> CascadeCard:
    """Return an answer as replies show it."""
    return CascadeCard(
        model=answer.model,
        stage=answer.stage,
        reason=answer.reason,
        confidence=_rounded(answer.confidence),
        threshold=_rounded(answer.threshold),
        stages=[
            StageCard(
                stage=one.stage,
                name=one.name,
                queue_s=round(one.queue_s, 6),
                took_s=round(one.took_s, 6),
            )
            for one in answer.stages
        ],
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
