"""The caption grammar.

    caption    = row { "above" row } [ "on a" background "background" ]
    row        = object { "left of" object }
    object     = "a" [ size ] colour shape [ place ]
    place      = "in the center" | "on the left" | "on the right" | "at the" corner-or-edge

A place is written only for a single object; several objects are placed by their relations.
"""

from ray_cluster.errors import RayClusterError
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    LAYOUTS,
    POSITIONS,
    SHAPES,
    SIZES,
    Position,
    Scene,
    SceneObject,
)


class CaptionError(RayClusterError):
    """A scene that the grammar cannot state; the message names what it cannot."""


def place_phrase(position: Position) -> str:
    """Write a position in a caption's words, e.g. ``at the top left``."""
    if position == "center":
        return "in the center"
    return f"on the {position}" if position in ("left", "right") else f"at the {position}"


def write_caption(scene: Scene) -> str:
    """Write a scene as a caption, leaving out what it leaves unspecified.

    Raises:
        CaptionError: several objects are in none of the layouts.
    """
    if len(scene.objects) == 1:
        text = _write_object(scene.objects[0])
        position = scene.objects[0].position
        text = text if position is None else f"{text} {place_phrase(position)}"
    else:
        text = _write_rows(scene.objects)
    return text if scene.background is None else f"{text} on a {scene.background} background"


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
    raise CaptionError(f"objects at {stated} are in no layout; allowed: {LAYOUTS}")
