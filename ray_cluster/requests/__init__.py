"""What a request is: torch-free value types that gateways, dispatcher and replicas share.

One :class:`ImageRequest` makes one image. An API call with ``n`` images becomes ``n`` of them,
offered to the dispatcher together.
"""

from __future__ import annotations

from ray_cluster.requests.image import (
    ImageRequest,
    candidate_name,
    file_name,
    granted,
    state_name,
    with_steps,
)
from ray_cluster.requests.model_profile import (
    ModelProfile,
    PromptTokenizer,
)
from ray_cluster.requests.parts import (
    FLOW_SAMPLER_NAMES,
    IMAGE_FORMATS,
    MAX_GUIDANCE_SCALE,
    SAMPLER_NAMES,
    UPSCALE_FACTORS,
    AddOns,
    BlobRef,
    CascadeUse,
    ControlNetUse,
    Edit,
    EditKind,
    EngineKind,
    FlowSampler,
    GuidanceKind,
    ImageFormat,
    LightStage,
    LoraUse,
    NoiseSampler,
    OutputSpec,
    Reference,
    SamplerName,
    UpscaleUse,
    noise_samplers,
    size_of,
)
from ray_cluster.requests.results import (
    SMALL_SIDE_PX,
    Failure,
    ImageResult,
    SmallImage,
    Timing,
)

__all__ = [
    "FLOW_SAMPLER_NAMES",
    "IMAGE_FORMATS",
    "MAX_GUIDANCE_SCALE",
    "SAMPLER_NAMES",
    "SMALL_SIDE_PX",
    "UPSCALE_FACTORS",
    "AddOns",
    "BlobRef",
    "CascadeUse",
    "ControlNetUse",
    "Edit",
    "EditKind",
    "EngineKind",
    "Failure",
    "FlowSampler",
    "GuidanceKind",
    "ImageFormat",
    "ImageRequest",
    "ImageResult",
    "LightStage",
    "LoraUse",
    "ModelProfile",
    "NoiseSampler",
    "OutputSpec",
    "PromptTokenizer",
    "Reference",
    "SamplerName",
    "SmallImage",
    "Timing",
    "UpscaleUse",
    "candidate_name",
    "file_name",
    "granted",
    "noise_samplers",
    "size_of",
    "state_name",
    "with_steps",
]
