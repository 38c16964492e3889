"""The JSON of LoRAs: as calls name them, as they are registered, and as they are listed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ray_cluster.config.sections.loras import LORA_NAME
from ray_cluster.errors import without_password
from ray_cluster.protocol.loras import LoraState, LoraStatus

# of one image
MAX_LORAS = 8
MAX_LORA_SCALE = 4
# registered names are shorter; in a process of its own, `generate` names files by their paths
_MAX_NAME_CHARS = 512
_MAX_SOURCE_CHARS = 1000


class LoraChoice(BaseModel):
    """A LoRA that a call names, and its weight."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: str = Field(
        min_length=1, max_length=_MAX_NAME_CHARS, description="One that `GET /v1/loras` lists."
    )
    scale: float | None = Field(
        None,
        ge=-MAX_LORA_SCALE,
        le=MAX_LORA_SCALE,
        description="Weight; 1 if absent, and 0 is as without it.",
    )

    @property
    def weight(self) -> float:
        """How often its difference to the base counts."""
        return 1.0 if self.scale is None else float(self.scale)


class LoraCard(BaseModel):
    """A LoRA that an image is made with."""

    name: str
    scale: float = Field(description="Its weight.")


LoraChoices = Annotated[
    list[LoraChoice] | None,
    Field(
        max_length=MAX_LORAS,
        description="(extension) LoRAs of the model, with their weights; none if absent.",
    ),
]
LoraCards = Annotated[
    list[LoraCard] | None,
    Field(description="(extension) The LoRAs it was made with; absent without any."),
]
LoraStartStep = Annotated[
    int | None,
    Field(
        ge=0,
        description="(extension) How many of the image's first steps are made without its LoRAs; "
        "0 if absent. With a `fidelity` other than `exact` the service chooses it.",
    ),
]
LoraStarted = Annotated[
    int | None,
    Field(
        description="(extension) How many of its first steps were made without its LoRAs; "
        "absent for none."
    ),
]


class LoraRegistration(BaseModel):
    """What registers a LoRA; null and absent mean the same."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={
            "examples": [
                {"name": "pastel", "base": "shapes-sd", "source": "builtin:pastel"},
                {
                    "name": "sketch",
                    "base": "shapes-sd",
                    "source": "/models/loras/sketch.safetensors",
                    "pinned": True,
                },
            ]
        },
    )

    name: str = Field(
        pattern=f"^{LORA_NAME.pattern}$",
        description="How calls choose it: letters, digits, `.`, `_` and `-`.",
    )
    base: str = Field(min_length=1, description="The model that it is made for.")
    source: str = Field(
        min_length=1,
        max_length=_MAX_SOURCE_CHARS,
        description="Where its file is: `builtin:NAME`, a path, a URL, or `hf:OWNER/NAME`. The "
        "service's configuration says what is allowed (`loras.sources`).",
    )
    sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="Digest of the file; another file is refused. Any will do if absent.",
    )
    pinned: bool | None = Field(
        None, description="Whether it is fetched at once and never removed to make space."
    )


class LoraResponse(BaseModel):
    """A registered LoRA."""

    id: str = Field(description="Its name.")
    object: Literal["lora"] = "lora"
    name: str = Field(description="How calls choose it.")
    base: str = Field(description="The model that it is made for.")
    model: str = Field(description="The name under which it is a model of its own.")
    source: str = Field(description="Where its file is; the query of a URL is left out.")
    sha256: str | None = Field(
        description="Digest of the file: the one that it was registered with, else of the file "
        "that was fetched; null before."
    )
    pinned: bool
    created: float = Field(description="Unix time in seconds.")
    state: LoraState = Field(
        description="`registered`: no call has needed it yet; `fetching`; `ready` on a node at "
        "least; `failed`; `removing`: it is forgotten once its last image is made."
    )
    error: str | None = Field(description="Why it failed; null otherwise.")
    is_permanent: bool = Field(description="Whether it will fail again, whatever is done.")
    num_bytes: int | None = Field(description="Size of its factors; null before it was fetched.")
    ranks: list[int] | None = Field(description="The different ranks of its layers; null likewise.")
    num_layers: int | None = Field(description="Layers that it changes; null likewise.")
    changes_prompts: bool | None = Field(
        description="Whether text encoders are among them; null likewise."
    )
    num_uses: int = Field(description="Images accepted with it.")
    nodes: list[str] = Field(description="The nodes that have it.")


class LoraList(BaseModel):
    """A page of LoRAs, by name."""

    object: Literal["list"] = "list"
    data: list[LoraResponse]
    first_id: str | None
    last_id: str | None = Field(description="Give it as `after` for the next page.")
    has_more: bool


def lora_reply(status: LoraStatus) -> LoraResponse:
    """Return a LoRA as replies show it."""
    lora, facts = status.lora, status.facts
    return LoraResponse(
        id=lora.name,
        name=lora.name,
        base=lora.base,
        model=f"{lora.base}:{lora.name}",
        # a signed URL is a secret of who registered it
        source=without_password(lora.source),
        sha256=lora.sha256 or (None if facts is None else facts.sha256),
        pinned=lora.is_pinned,
        created=lora.added_s,
        state=status.state,
        error=status.reason or None,
        is_permanent=status.is_permanent,
        num_bytes=None if facts is None else facts.num_bytes,
        ranks=None if facts is None else list(facts.ranks),
        num_layers=None if facts is None else facts.num_layers,
        changes_prompts=None if facts is None else facts.changes_prompts,
        num_uses=status.num_uses,
        nodes=list(status.nodes),
    )
