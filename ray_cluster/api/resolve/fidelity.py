"""``fidelity``, ``allow``, ``min_inference_steps``: how many steps, of which some may be reused."""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.input.validation import describe
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.fidelity import FewerSteps, Fidelity, LoraStart, StepTable, Terms
from ray_cluster.requests import SamplerName


@dataclass(frozen=True, slots=True)
class Setting:
    """What the steps of an image depend on.

    Attributes:
        outer_blocks: fewest and most outer blocks of the model's reuse schedules.
        lora_start: of an image with LoRAs, by fidelity; None for one without.
    """

    model: str
    table: StepTable | None
    sampler: SamplerName
    guidance_scale: float
    num_steps: int
    outer_blocks: tuple[int, int] | None = None
    lora_start: LoraStart | None = None


def resolve_steps(fields: ImageGenerationRequest, setting: Setting) -> tuple[int, Terms | None]:
    """Return the steps of a call's images, and their terms, None if all must be exact.

    Raises:
        InvalidRequest: the model does not offer the fidelity that is asked for or allowed, or the
            fields contradict each other.
    """
    fidelity: Fidelity = fields.fidelity or "exact"
    allowed = set(fields.allow or ())
    known = _known(setting)
    if setting.lora_start is not None and setting.lora_start.share(fidelity) is not None:
        return _with_loras(fields, fidelity, known, setting)
    if fidelity != "exact" and known is None:
        raise _not_known("fidelity", fidelity, setting)
    if "fidelity" in allowed and known is None:
        raise _not_known("allow", "fidelity", setting)
    if "fidelity" in allowed and fidelity == "fast":
        what = "with 'fidelity' changes nothing beside fidelity 'fast', the least there is"
        raise wrong("allow", what, "leave one out")
    reuse = None if known is None else known.reuse(fidelity)
    # admission shortens a request that may be degraded: its steps without reuse are known to do
    if reuse is not None and not allowed and fields.min_inference_steps is None:
        fewest_outer, most_outer = setting.outer_blocks or (1, 0)
        if fewest_outer <= reuse.schedule.num_outer <= most_outer:
            steps = reuse.num_steps
            return steps, Terms(fidelity, setting.num_steps, steps, known, reuse)
    num_steps = setting.num_steps if known is None else known.steps(fidelity)
    floors = [] if known is None or "fidelity" not in allowed else [known.fast]
    if (least := _min_steps(fields, setting, num_steps)) is not None:
        floors.append(least)
    fewest = min(floors, default=None)
    if fidelity == "exact" and fewest is None:
        return num_steps, None
    floor = num_steps if fewest is None else fewest
    return num_steps, Terms(fidelity, setting.num_steps, floor, known)


def _with_loras(
    fields: ImageGenerationRequest, fidelity: Fidelity, known: FewerSteps | None, setting: Setting
) -> tuple[int, Terms]:
    """Return the steps of images that are made without their LoRAs at first, and their terms.

    As few as without LoRAs, but none reuses activations: they would be of a step without LoRAs.
    """
    num_steps = setting.num_steps if known is None else known.steps(fidelity)
    fewest = _min_steps(fields, setting, num_steps) or num_steps
    return num_steps, Terms(fidelity, setting.num_steps, fewest, known, is_measured=False)


def check_unmeasured(fields: ImageGenerationRequest, measured: str, what: str) -> None:
    """Refuse a fidelity other than exact for what its steps were not measured for.

    Args:
        measured: for what they were, for the message.
        what: what the call asks for instead.
    """
    name = "allow" if "fidelity" in (fields.allow or ()) else "fidelity"
    if name == "allow" or fields.fidelity not in {None, "exact"}:
        raise wrong(
            name,
            f"asks for fewer steps than exact images take, which were measured {measured}",
            more="Leave it out; num_inference_steps and min_inference_steps set the effort of "
            f"{what}.",
            code="fidelity_not_offered",
        )


def _known(setting: Setting) -> FewerSteps | None:
    table = setting.table
    if table is None or table.sampler != setting.sampler:
        return None
    if setting.guidance_scale > table.max_guidance_scale:
        return None
    return table.row(setting.num_steps)


def _not_known(param: str, value: str, setting: Setting) -> InvalidRequest:
    """Return the error for a fidelity whose steps were not measured."""
    table, model = setting.table, setting.model
    if table is None:
        why = f"how few steps {model} needs for it has not been measured"
        instead = (
            "Leave it out, or set num_inference_steps lower. Whoever runs the service can give a "
            "model whose engine is 'steps' a table of steps (its pool's 'fidelity')"
        )
    elif table.sampler != setting.sampler:
        why = f"{model} was measured with sampler {table.sampler!r} only; given {setting.sampler!r}"
        instead = f"Take sampler {table.sampler!r}, or leave it out"
    elif setting.guidance_scale > table.max_guidance_scale:
        most = f"{table.max_guidance_scale:g}"
        why = f"{model} was measured up to guidance_scale {most}; given {setting.guidance_scale!r}"
        instead = f"Set guidance_scale to at most {most}, or leave it out"
    else:
        why = f"{model} was measured up to {table.most_asked} steps; asked for {setting.num_steps}"
        instead = f"Set num_inference_steps to at most {table.most_asked}, or leave it out"
    what = f"cannot be {value!r} here: {why}"
    return wrong(param, what, more=f"{instead}.", code="fidelity_not_offered")


def _min_steps(fields: ImageGenerationRequest, setting: Setting, num_steps: int) -> int | None:
    given, allow = fields.min_inference_steps, fields.allow
    if given is None:
        if allow is not None and "steps" in allow:
            raise wrong("allow", "holds 'steps', but not how few may be made", "steps of allow")
        return None
    if allow is not None and "steps" not in allow:
        what = f"is {describe(given)}, but 'allow' does not hold 'steps'"
        raise wrong("min_inference_steps", what, "steps in allow")
    if given > num_steps:
        of = f" ({fields.fidelity} of {setting.num_steps})" if num_steps < setting.num_steps else ""
        what = f"must be at most the steps of the image, {num_steps}{of}; given {describe(given)}"
        raise wrong("min_inference_steps", what, "lower steps")
    return given
