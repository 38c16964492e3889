"""API keys: as a configuration has them, and as processes know them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self, get_args

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ray_cluster.config.section import Section

Role = Literal["use", "loras", "operate"]
"""What a key allows: calls for images; to register and remove LoRAs; to steer the service."""
ROLES: tuple[Role, ...] = get_args(Role)
KEY_PREFIX = "sha256:"
# owners of what no key has sent: `storage.inputs.OPEN_OWNER`
RESERVED_CLIENTS = frozenset({"open"})

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_DIGEST = re.compile(rf"{KEY_PREFIX}[0-9a-fA-F]{{64}}")
_FORM = "a key is a text, or a mapping of 'name', 'key' and 'roles'"
_HOW = "'ray-cluster keys new NAME' makes a key and its entry, 'ray-cluster keys digest' reads one"
_EMPTY = "an API key is empty; nobody could call with it: leave it out"


def key_digest(key: str) -> str:
    """Return the digest of an API key, which is stored and sent in its place."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A valid key, without the key itself.

    Attributes:
        digest: SHA-256 in hexadecimal digits.
        client: whose it is, who owns jobs, files and limits; several keys may have the same.
        roles: of this key, in the order of :data:`ROLES`.
    """

    digest: str
    client: str
    roles: tuple[Role, ...] = ("use",)

    @classmethod
    def plain(cls, key: str) -> ApiKey:
        """Return a key without a name: its client is its digest, and it may use the service."""
        digest = key_digest(key)
        return cls(digest, digest)


class KeyConfig(Section):
    """Who may call, all if the list is empty. Either the key itself as a text, which is a client of
    its own with the role ``use``; or a mapping of the rows below, as ``ray-cluster keys new NAME``
    prints it. Texts in the environment variable RAY_CLUSTER_API_KEYS (comma-separated) are added.
    """

    name: str | None = Field(
        description="client that it belongs to: small letters, digits, `.`, `_` and `-`, at most "
        "64. Several keys may have one name, such as an old and a new one"
    )
    key: SecretStr = Field(description="`sha256:` and the SHA-256 of the key")
    roles: tuple[Role, ...] = Field(
        ("use",),
        min_length=1,
        description="what it allows, one or several: `use`: make images; `loras`: register and "
        "remove LoRAs; `operate`: pause plans, priorities above 0",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _of_text(cls, given: object, read: ModelWrapValidatorHandler[KeyConfig]) -> KeyConfig:
        """Make an entry of a plain key; quotes nothing, as anything here may be a secret."""
        if isinstance(given, SecretStr):
            given = given.get_secret_value()
        if isinstance(given, str):
            if not given.strip():
                raise ValueError(_EMPTY)
            if _DIGEST.fullmatch(given.strip()):
                raise ValueError(f"is a digest where a plain key is expected; {_FORM}")
            return cls.model_construct(name=None, key=SecretStr(given), roles=("use",))
        is_entry = isinstance(given, cls | dict)
        if not is_entry or (
            isinstance(given, dict) and not given.keys() <= cls.model_fields.keys()
        ):
            raise ValueError(f"{_FORM}, and of nothing else; {_HOW}")
        return read(given)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is None or _NAME.fullmatch(name) is None:
            raise ValueError(
                "must be 1 to 64 small letters, digits, '.', '_' and '-', and begin with a letter "
                "or digit"
            )
        if _HEX.fullmatch(name) is not None:
            raise ValueError("looks like a digest, by which clients of plain keys are known")
        if name in RESERVED_CLIENTS:
            raise ValueError(f"must not be {name!r}, which stands for all callers without a key")
        return name

    @field_validator("key")
    @classmethod
    def _check_key(cls, key: SecretStr) -> SecretStr:
        text = key.get_secret_value()
        if _DIGEST.fullmatch(text) is None:
            raise ValueError(
                f"must be '{KEY_PREFIX}' and the 64 hexadecimal digits of the key's SHA-256, not "
                f"the key itself; {_HOW}"
            )
        if text.lower().endswith(key_digest("")):
            raise ValueError(_EMPTY)
        return SecretStr(text.lower())

    @field_validator("roles")
    @classmethod
    def _order(cls, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        return tuple(one for one in ROLES if one in roles)

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> object:
        written = write(self)
        return written["key"] if self.name is None else written

    @property
    def plain(self) -> str | None:
        """The key itself; None where only its digest is known."""
        return self.key.get_secret_value() if self.name is None else None

    @property
    def entry(self) -> ApiKey:
        """What processes know of it."""
        if self.name is None:
            return ApiKey.plain(self.key.get_secret_value())
        digest = self.key.get_secret_value().removeprefix(KEY_PREFIX)
        return ApiKey(digest, self.name, self.roles)

    @classmethod
    def of(cls, name: str, key: str, roles: Iterable[str]) -> Self:
        """Return the entry of a key; raises ``ValidationError`` for a wrong name or role."""
        digest = f"{KEY_PREFIX}{key_digest(key)}"
        return cls.model_validate({"name": name, "key": digest, "roles": tuple(roles)})


def check_distinct(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Return the keys, each once.

    Raises:
        ValueError: one key has two names, or other roles the second time.
    """
    by_digest: dict[str, tuple[int, ApiKey]] = {}
    for number, one in enumerate(keys):
        first, known = by_digest.setdefault(one.digest, (number, one))
        if known != one:
            raise ValueError(
                f"entries {first} and {number} (from 0; those of RAY_CLUSTER_API_KEYS come last) "
                "are the same key with different names or roles: leave one of them out"
            )
    return tuple(one for _, one in by_digest.values())
