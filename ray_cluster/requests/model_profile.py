"""What a model accepts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_cluster.policies.fidelity import LoraStart, StepTable
from ray_cluster.requests.parts import EditKind, EngineKind, GuidanceKind, SamplerName


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """A tokenizer that counts the tokens of a model's prompts.

    Attributes:
        content: its JSON in the form of the ``tokenizers`` library, compressed with zlib.
        max_tokens: most tokens of a prompt, without those that mark its ends.
    """

    content: bytes = field(repr=False)
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What a model accepts, as its replicas register it; the gateway validates with it.

    Attributes:
        size_multiple_px: width and height must be multiples of this.
        min_px: smallest side.
        max_px: largest side.
        default_width_px: used for ``size: auto``.
        max_prompt_tokens: longer prompts are refused, never silently cut.
        max_steps_by_sampler: most denoising steps each sampler can take.
        guidance: what a guidance scale does.
        fewer_steps: steps by fidelity; None where that was not measured.
        outer_blocks: fewest and most outer blocks of its reuse schedules; None for no reuse.
        prompt_digest: of the tokenizers that count; empty where only replicas can count.
        edits: what it makes of images; inpainting models need a mask.
        max_references: most pictures that it looks at beside the prompt; 0 for none.
        max_masked_references: most of an edit with a mask, with the one that is edited; None for
            `max_references`.
        min_references: fewest; with 1, it makes nothing from text alone.
        max_reference_px: most pixels of each, to which larger ones are scaled down.
        min_reference_px: fewest, to which smaller ones are scaled up.
        min_reference_side_px: shorter ones are scaled up with their picture.
        max_reference_ratio: of the longer side of a picture to the other; None for any.
        engine: what runs it; calls take no ControlNets, no LoRAs, and show no previews.
        lora_start: steps without LoRAs by fidelity; None where no mode but exact is offered with
            LoRAs.
    """

    model: str
    family: str
    size_multiple_px: int
    min_px: int
    max_px: int
    default_width_px: int
    default_height_px: int
    default_num_steps: int
    default_guidance_scale: float
    default_sampler: SamplerName
    max_steps_by_sampler: dict[SamplerName, int]
    max_prompt_tokens: int
    created_s: int
    guidance: GuidanceKind = "rows"
    fewer_steps: StepTable | None = None
    outer_blocks: tuple[int, int] | None = None
    prompt_digest: str = ""
    edits: EditKind = "any"
    max_references: int = 0
    max_masked_references: int | None = None
    min_references: int = 0
    max_reference_px: int = 1024 * 1024
    min_reference_px: int = 0
    min_reference_side_px: int = 1
    max_reference_ratio: int | None = None
    engine: EngineKind = "steps"
    lora_start: LoraStart | None = None
