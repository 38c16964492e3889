"""The caption grammar, in both directions.

    caption    = row { "above" row } [ "on a" background "background" ]
    row        = object { "left of" object }
    object     = "a" [ size ] colour shape [ place ]
    place      = "in the center" | "on the left" | "on the right" | "at the" corner-or-edge

A place is written only for a single object; several objects are placed by their relations.
"""

from typing import get_args

from ray_cluster.errors import RayClusterError
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    LAYOUTS,
    POSITIONS,
    SHAPES,
    SIZES,
    Background,
    Colour,
    Position,
    Scene,
    SceneObject,
    Shape,
    Size,
)

_BACKGROUND_MARK = " on a "
_BACKGROUND_END = " background"


class CaptionError(RayClusterError):
    """A caption outside the grammar; the message names the part that was not understood."""


def place_phrase(position: Position) -> str:
    """Write a position as it stands in a caption, e.g. ``at the top left``."""
    if position == "center":
        return "in the center"
    return f"on the {position}" if position in ("left", "right") else f"at the {position}"


def write_caption(scene: Scene) -> str:
    """Write a scene as a caption, leaving out what it leaves unspecified.

    Raises:
        CaptionError: if several objects do not stand in one of the layouts.
    """
    if len(scene.objects) == 1:
        text = _write_object(scene.objects[0])
        position = scene.objects[0].position
        text = text if position is None else f"{text} {place_phrase(position)}"
    else:
        text = _write_rows(scene.objects)
    return (
        text
        if scene.background is None
        else f"{text}{_BACKGROUND_MARK}{scene.background}{_BACKGROUND_END}"
    )


def parse_caption(caption: str) -> Scene:
    """Read a caption back into the scene that it states; what it omits is `None`.

    Raises:
        CaptionError: if the caption is not in the grammar.
    """
    text, background = _split_background(" ".join(caption.lower().split()))
    rows = [row.split(" left of ") for row in text.split(" above ")]
    if len(rows) == 1 and len(rows[0]) == 1:
        return Scene((_parse_object(rows[0][0]),), background)
    shape = tuple(len(row) for row in rows)
    layout = next(
        (layout for layout in LAYOUTS if tuple(len(row) for row in layout) == shape), None
    )
    if layout is None:
        allowed = sorted({tuple(len(row) for row in layout) for layout in LAYOUTS})
        raise CaptionError(f"rows of {shape} objects are not in the grammar; allowed: {allowed}")
    positions = [position for row in layout for position in row]
    parsed = [_parse_object(part) for row in rows for part in row]
    if any(thing.position is not None for thing in parsed):
        raise CaptionError(
            "several objects are placed by relations, not by a place; remove the place"
        )
    pairs = zip(parsed, positions, strict=True)
    return Scene(
        tuple(SceneObject(t.shape, t.colour, t.size, position) for t, position in pairs), background
    )


def caption_words() -> tuple[str, ...]:
    """List every word of the grammar once, in a fixed order."""
    words: list[str] = [*SHAPES, *COLOURS, *SIZES, *BACKGROUNDS]
    words += " ".join(place_phrase(position) for position in POSITIONS).split()
    words += ["a", "on", "background", "left", "of", "above"]
    return tuple(dict.fromkeys(words))


def _write_object(thing: SceneObject) -> str:
    return " ".join(
        word for word in ("a", thing.size, thing.colour, thing.shape) if word is not None
    )


def _write_rows(objects: tuple[SceneObject, ...]) -> str:
    stated = tuple(thing.position for thing in objects)
    for layout in LAYOUTS:
        if tuple(position for row in layout for position in row) == stated:
            written = iter(_write_object(thing) for thing in objects)
            return " above ".join(" left of ".join(next(written) for _ in row) for row in layout)
    raise CaptionError(f"objects at {stated} stand in no layout; allowed: {LAYOUTS}")


def _split_background(text: str) -> tuple[str, Background | None]:
    head, mark, tail = text.rpartition(_BACKGROUND_MARK)
    if not mark:
        return text, None
    name = tail.removesuffix(_BACKGROUND_END)
    for background in BACKGROUNDS:
        if name == background and tail != name:
            return head, background
    raise CaptionError(f"background {tail!r} is unknown; allowed: {', '.join(BACKGROUNDS)}")


def _parse_object(text: str) -> SceneObject:
    position: Position | None = None
    for candidate in POSITIONS:
        phrase = f" {place_phrase(candidate)}"
        if text.endswith(phrase):
            text, position = text.removesuffix(phrase), candidate
            break
    words = text.split()
    sizes: list[Size] = [size for size in SIZES if size in words[1:2]]
    rest = words[1 + len(sizes) :]
    colours: list[Colour] = [colour for colour in COLOURS if rest[:1] == [colour]]
    shapes: list[Shape] = [shape for shape in SHAPES if rest[1:] == [shape]]
    if words[:1] != ["a"] or not colours or not shapes:
        raise CaptionError(
            f"{text!r} is not an object; write 'a [{'|'.join(get_args(Size))}] colour shape'"
        )
    return SceneObject(shapes[0], colours[0], sizes[0] if sizes else None, position)
