"""What all sections of the configuration are: frozen mappings whose keys say how a change applies.

A key is ``live`` (a running service takes another value), ``redeploy`` (processes are started with
it), or a ``count`` of processes, and how it is kept (some are started or stopped, none is
replaced). Each process gets the part of the document that follows from these marks: :func:`part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

Applied = Literal["live", "redeploy", "count"]
"""How a change of a key reaches a running service."""

# of a custom resource of Ray
RESOURCE_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,62}$"

# marks of keys, as `json_schema_extra`; others have the mark of their section
LIVE: dict[str, Any] = {"applied": "live"}
REDEPLOY: dict[str, Any] = {"applied": "redeploy"}
COUNT: dict[str, Any] = {"applied": "count"}
# of keys that only the front is started with: secrets, and what others need not be replaced for
FRONT: dict[str, Any] = {"applied": "redeploy", "front": True}
# of keys that processes are started with, and that calls are checked with as the file has them
CALLS: dict[str, Any] = {"applied": "redeploy", "calls": True}


class Section(BaseModel):
    """A frozen mapping without unknown keys; what is in quotes is no number."""

    # what was given may be a secret, and tracebacks show whole errors
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    APPLIED: ClassVar[Applied] = "redeploy"
    """Of keys without a mark of their own."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, given: object, info: ValidationInfo) -> object:
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        if float in kinds and isinstance(given, str | bool):
            raise PydanticKnownError("float_type")
        if int in kinds and isinstance(given, str | bool):
            raise PydanticKnownError("int_type")
        if bool in kinds and isinstance(given, str):
            raise PydanticKnownError("bool_type")
        return given


SectionT = TypeVar("SectionT", bound=Section)


def absolute(path: str | None) -> str | None:
    """Return the path of a file that another machine reads; ValueError if it is relative."""
    if path is not None and not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path, such as /etc/ray-cluster/FILE")
    return path


def applied(kind: type[Section], key: str) -> Applied:
    """Return how a change of a key of a section reaches a running service."""
    found: Applied = _mark(kind, key).get("applied", kind.APPLIED)
    return found


def _mark(kind: type[BaseModel], key: str) -> Mapping[str, Any]:
    extra = kind.model_fields[key].json_schema_extra
    return extra if isinstance(extra, dict) else {}


def part(
    section: Section,
    *of: Applied,
    for_calls: bool = False,
    for_front: bool = True,
    given_only: bool = False,
) -> dict[str, Any]:
    """Return the keys of a section that have one of some marks, as JSON has them.

    Args:
        for_calls: whether those come too that calls are checked with.
        for_front: whether those come that the front alone is started with.
        given_only: whether those are left out that have their defaults because nobody gave them.
    """
    keys = marked_keys(type(section), *of, for_calls=for_calls, for_front=for_front)
    return section.model_dump(mode="json", include=keys, exclude_unset=given_only)


def marked_keys(
    kind: type[Section], *of: Applied, for_calls: bool = False, for_front: bool = True
) -> set[str]:
    """Return the keys of a section that have one of some marks; arguments as of :func:`part`."""
    marks = {key: _mark(kind, key) for key in kind.model_fields}
    return {
        key
        for key, mark in marks.items()
        if (applied(kind, key) in of and (for_front or "front" not in mark))
        or (for_calls and "calls" in mark)
    }


def with_part(section: SectionT, values: Mapping[str, Any]) -> SectionT:
    """Return a section with other values of some keys, validated as a whole.

    Raises:
        pydantic.ValidationError: the values do not suit the others.
    """
    return type(section).model_validate({**section.model_dump(), **values})


def changed(section: SectionT, **values: Any) -> SectionT:
    """Return a section with values that need no check; what they leave as it is was not given."""
    update = {key: value for key, value in values.items() if value != getattr(section, key)}
    return section.model_copy(update=update)


def section_in(annotation: Any) -> type[Any] | None:
    """Return the section that a field holds, one or several of; None if it holds a value."""
    found = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return next((one for one in found if issubclass(one, BaseModel)), None)


def without_unknown(
    kind: type[Section], values: Mapping[str, Any], place: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of keys that a section has, and the places of the others.

    Whoever reads what another release has written goes on without what it does not know.
    """
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in values.items():
        if key not in kind.model_fields:
            unknown.append(f"{place}{key}")
            continue
        inner = section_in(kind.model_fields[key].annotation)
        is_list = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
        if inner is not None and isinstance(value, Mapping):
            known[key], more = without_unknown(inner, value, f"{place}{key}.")
            unknown += more
        elif inner is not None and is_list:
            parts = [without_unknown(inner, one, f"{place}{key}.") for one in value]
            known[key] = [one for one, _ in parts]
            unknown += [name for _, names in parts for name in names]
        else:
            # what is of another shape is refused when it is validated
            known[key] = value
    return known, unknown
