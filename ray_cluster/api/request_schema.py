"""The JSON schema of a generation call, with the bounds of this service in it."""

from __future__ import annotations

from typing import Any

from ray_cluster.api.schema import ImageGenerationRequest
from ray_cluster.config import ClusterConfig


def request_schema(config: ClusterConfig) -> dict[str, Any]:
    """Return what a call's body may hold here; whoever keeps to it is refused for little else.

    What depends on the model (its sizes, the samplers' steps) stands in ``GET /v1/models``.
    """
    # all parts of the schema are inside it: no reference to other components
    schema = ImageGenerationRequest.model_json_schema()
    assert "$defs" not in schema
    limits = config.limits
    num_images = min(limits.max_images_per_request, limits.max_queued_images)
    _bound(schema, "prompt", "maxLength", limits.max_prompt_chars)
    _bound(schema, "negative_prompt", "maxLength", limits.max_prompt_chars)
    _bound(schema, "n", "maximum", num_images)
    _bound(
        schema,
        "num_inference_steps",
        "maximum",
        max(pool.max_num_inference_steps for pool in config.pools),
    )
    return schema


def _bound(schema: dict[str, Any], name: str, keyword: str, bound: int) -> None:
    """Add a bound to a field, which may also be null."""
    field = schema["properties"][name]
    for one in field.get("anyOf", [field]):
        if one["type"] != "null":
            one[keyword] = bound
