"""Random edits by the official client, of any version from 1.x on, and what must come of them.

Usage: ``python drawn_edits.py URL API_KEY FIRST COUNT``. Prints one JSON object: the version of the
client, and the outcome of each edit.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx
import numpy as np
import numpy.typing as npt
import openai
from PIL import ExifTags, Image, ImageOps

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
SizePx = tuple[int, int]
Way = Literal["form", "json", "form job", "json job"]

# of the service's model, as `GET /v1/models` says
MIN_PX, MAX_PX = 32, 128
WAYS: tuple[Way, ...] = ("form", "form", "form", "json", "form job", "json job")
FILES = ("png", "png", "alpha", "palette", "grey", "jpeg", "webp", "turned")
MASKS = ("box", "disc", "lines", "scattered", "nearly all", "soft", "none")
SIZES = ("on the grid", "off the grid", "large, cropped", "large, scaled", "small", "asked for")
COLOURS = ("red", "green", "blue", "yellow", "cyan")
SHAPES = ("circle", "square", "triangle", "star", "ring")
CLIENTS = 6
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class DrawnEdit:
    """One edit.

    Attributes:
        kind: what was drawn, for reports.
        image: a file, as is the mask.
        fields: of the call, beside prompt and images.
    """

    seed: int
    kind: str
    way: Way
    prompt: str
    image: bytes
    mask: bytes | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one edit.

    Attributes:
        size_px: width and height of the result, beside what they should be.
        outside: pixels outside the mask; ``changed_outside`` of them are not the template's.
        inside: pixels within, beyond its feathered border; ``changed_inside`` of them changed.
        is_pasted: whether those outside must be the template's.
        strength: that the reply names; None for an image from text.
    """

    seed: int
    kind: str
    size_px: SizePx
    expected_px: SizePx
    outside: int
    changed_outside: int
    inside: int
    changed_inside: int
    is_pasted: bool
    strength: float | None


def draw(seed: int) -> DrawnEdit:
    """Return the edit of a seed; the same one always."""
    chance = random.Random(seed)
    numbers = np.random.default_rng(seed)
    # every value of each, whatever the number of edits
    file, mask_kind = FILES[seed % len(FILES)], MASKS[seed % len(MASKS)]
    size_kind, way = chance.choice(SIZES), chance.choice(WAYS)
    if mask_kind == "none" and size_kind == "large, cropped":
        size_kind = "large, scaled"
    size = _size(size_kind, chance)
    mask = None if mask_kind == "none" else _mask(mask_kind, size, chance, numbers)
    fields: dict[str, Any] = {"seed": seed, "slo_s": 600}
    fields |= _schedule(chance)
    if size_kind == "large, cropped":
        fields["crop"] = "auto"
    if size_kind == "asked for":
        fields["size"] = chance.choice(("64x64", "96x64", "128x96"))
    if mask is not None and "crop" not in fields and chance.random() < 0.15:
        fields["paste_back"] = False
    elif mask is not None:
        fields |= chance.choice(({}, {"feather_px": 3}, {"feather_px": 12}, {"paste_back": True}))
    image = _file(file, _picture(size, numbers), numbers)
    return DrawnEdit(
        seed=seed,
        kind=f"{way}, {file} of {size[0]}x{size[1]} ({size_kind}), mask {mask_kind}, {fields}",
        way=way,
        prompt=f"a large {chance.choice(COLOURS)} {chance.choice(SHAPES)} on a black background",
        image=image,
        mask=None if mask is None else _mask_file(mask, chance, numbers),
        fields=fields,
    )


def _size(kind: str, chance: random.Random) -> SizePx:
    match kind:
        case "on the grid":
            return chance.choice(((64, 64), (96, 64), (128, 128), (32, 64)))
        case "large, cropped" | "large, scaled":
            return chance.randint(129, 300), chance.randint(60, 260)
        case "small":
            return chance.randint(16, 31), chance.randint(16, 31)
    return chance.randint(32, 128), chance.randint(32, 128)


def _schedule(chance: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"sampler": chance.choice(("ddim", "euler", "dpmpp_2m", "lcm"))}
    match chance.randrange(4):
        case 0:
            fields["input_fidelity"] = chance.choice(("high", "low"))
        case 1:
            pass
        case _:
            fields["strength"] = chance.choice((1.0, 0.9, 0.6, 0.3, 0.15))
    # at least one is left of seven at the smallest strength
    return fields | {"num_inference_steps": chance.randint(7, 10)}


def _picture(size: SizePx, numbers: np.random.Generator) -> Pixels:
    """Return smooth areas, edges and noise, ``[H, W, 3]``."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    ends = numbers.integers(0, 256, (2, 3))
    share = (rows / height + columns / width)[..., None] / 2
    pixels = ends[0] * share + ends[1] * (1 - share)
    top, left = numbers.integers(0, (height // 2 + 1, width // 2 + 1))
    pixels[top : top + height // 2, left : left + width // 2] = numbers.integers(0, 256, 3)
    return np.clip(pixels + numbers.integers(-12, 13, pixels.shape), 0, 255).astype(np.uint8)


def _file(kind: str, pixels: Pixels, numbers: np.random.Generator) -> bytes:
    image = Image.fromarray(pixels)
    match kind:
        case "alpha":
            # all or nothing: so it is beyond doubt what it looks like on white
            image.putalpha(Image.fromarray(_blocks(image.size, numbers)))
        case "palette":
            image = image.quantize(64)
        case "grey":
            image = image.convert("L")
        case "webp":
            return _saved(image, "WEBP", lossless=True)
        case "jpeg":
            return _saved(image, "JPEG", quality=90)
        case "turned":
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = int(numbers.integers(2, 9))
            # a viewer turns it back
            undone = ImageOps.exif_transpose(_with_exif(image, exif))
            exif[ExifTags.Base.Orientation] = _INVERSE[exif[ExifTags.Base.Orientation]]
            return _saved(undone, "JPEG", quality=90, exif=exif)
    return _saved(image, "PNG")


# by orientation, the one that turns back what it turns
_INVERSE = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}


def _with_exif(image: Image.Image, exif: Image.Exif) -> Image.Image:
    return Image.open(io.BytesIO(_saved(image, "PNG", exif=exif)))


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def _blocks(size: SizePx, numbers: np.random.Generator) -> Pixels:
    width, height = size
    blocks = numbers.integers(0, 2, (height // 8 + 1, width // 8 + 1)) * 255
    return blocks.repeat(8, 0).repeat(8, 1)[:height, :width].astype(np.uint8)


def _mask(kind: str, size: SizePx, chance: random.Random, numbers: np.random.Generator) -> Pixels:
    """Return the alpha of a mask, ``[H, W]``: below 128 is edited."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    across, down = chance.uniform(0.2, 0.8) * width, chance.uniform(0.2, 0.8) * height
    radius = chance.uniform(0.15, 0.4) * min(size)
    away = np.hypot(columns - across, rows - down)
    alpha = np.full((height, width), 255, np.uint8)
    match kind:
        case "box":
            half = (max(1, width // 4), max(1, height // 4))
            left, top = chance.randint(0, half[0]), chance.randint(0, half[1])
            alpha[top : top + 2 * half[1], left : left + 2 * half[0]] = 0
        case "disc":
            alpha[away < radius] = 0
        case "lines":
            alpha[height // 3] = alpha[:, width // 2] = 0
            slanted = np.arange(min(size))
            alpha[slanted, slanted] = 127
        case "scattered":
            alpha[numbers.random((height, width)) < 0.02] = 0
        case "nearly all":
            alpha[:] = 0
            for left, top in zip(*(numbers.integers(0, side, 4) for side in size), strict=True):
                alpha[top : top + 6, left : left + 6] = 255
        case "soft":
            alpha = np.clip(away / radius * 128, 0, 255).astype(np.uint8)
    # none of them may be empty, or everything
    alpha[height // 2, width // 2], alpha[0, 0] = 0, 128
    return alpha


def _mask_file(alpha: Pixels, chance: random.Random, numbers: np.random.Generator) -> bytes:
    # its colours mean nothing
    image = Image.fromarray(numbers.integers(0, 256, (*alpha.shape, 3), dtype=np.uint8))
    if chance.random() < 0.3:
        image = image.convert("L")
    image.putalpha(Image.fromarray(alpha))
    if chance.random() < 0.2:
        return _saved(image.convert("RGBA"), "WEBP", lossless=True, exact=True)
    return _saved(image, "PNG")


def expected_size(edit: DrawnEdit) -> SizePx:
    """Return the size of the result as the documentation says it."""
    if "size" in edit.fields:
        width, _, height = edit.fields["size"].partition("x")
        return int(width), int(height)
    size = _seen(edit.image).size
    if "crop" in edit.fields:
        return size
    scale = 1.0
    if max(size) > MAX_PX:
        scale = MAX_PX / max(size)
    elif min(size) < MIN_PX:
        scale = MIN_PX / min(size)
    width, height = (min(MAX_PX, max(MIN_PX, round(side * scale))) for side in size)
    return width, height


def canvas_of(edit: DrawnEdit) -> Pixels:
    """Return the template's pixels in the size of the result."""
    seen = _seen(edit.image).convert("RGBA")
    on_white = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    size = expected_size(edit)
    if on_white.size != size:
        on_white = on_white.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(on_white)


def mask_of(edit: DrawnEdit) -> Mask | None:
    """Return what is edited in the size of the result: what any edited pixel touches."""
    if edit.mask is None:
        return None
    edited = np.asarray(_seen(edit.mask).convert("RGBA"))[..., 3] < 128
    width, height = expected_size(edit)
    down, across = _overlaps(height, edited.shape[0]), _overlaps(width, edited.shape[1])
    return np.asarray(down @ edited.astype(int) @ across.T > 0)


def _overlaps(side: int, length: int) -> npt.NDArray[np.int_]:
    """Return which of ``length`` pixels those of a side of other pixels touch, as 0 and 1."""
    of_side, of_length = np.arange(side)[:, None], np.arange(length)[None]
    starts_before = of_side * length < (of_length + 1) * side
    ends_after = (of_side + 1) * length > of_length * side
    return (starts_before & ends_after).astype(int)


def _seen(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def send(client: openai.OpenAI, edit: DrawnEdit) -> tuple[dict[str, Any], bytes]:
    """Make the edit; return what is said of it, and the image."""
    if edit.way == "form":
        extra, files = dict(edit.fields), {"image": edit.image}
        known = {name: extra.pop(name) for name in ("input_fidelity", "size") if name in extra}
        if edit.mask is not None:
            files["mask"] = edit.mask
        reply = client.images.edit(
            **files,  # type: ignore[arg-type]
            **known,
            prompt=edit.prompt,
            extra_body=extra,
        )
        [made] = json.loads(reply.model_dump_json())["data"]
        return made, base64.b64decode(made["b64_json"])
    body = {"prompt": edit.prompt, **edit.fields}
    images = {"image": edit.image} | ({} if edit.mask is None else {"mask": edit.mask})
    path = "/jobs" if edit.way.endswith("job") else "/images/edits"
    if edit.way == "form job":
        found: Any = client.post(
            path,
            body=body,
            files=list(images.items()),
            options={"headers": {"Content-Type": "multipart/form-data"}},
            cast_to=object,
        )
    else:
        body |= {name: base64.b64encode(data).decode() for name, data in images.items()}
        found = client.post(path, body=body, cast_to=object)
    if path == "/jobs":
        return _awaited(client, found)
    [made] = found["data"]
    return made, base64.b64decode(made["b64_json"])


def _awaited(client: openai.OpenAI, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    deadline_s = time.monotonic() + PATIENCE_S
    while job["state"] != "completed":
        if job["state"] in {"failed", "cancelled"} or time.monotonic() > deadline_s:
            raise AssertionError(job)
        time.sleep(0.1)
        found: Any = client.get(f"/jobs/{job['id']}", cast_to=object)
        job = found
    [made] = job["data"]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    reply = httpx.get(made["url"], headers=headers, timeout=60)
    reply.raise_for_status()
    return made, reply.content


def outcome_of(edit: DrawnEdit, made: dict[str, Any], data: bytes) -> Outcome:
    """Compare the result with the template."""
    result = Image.open(io.BytesIO(data))
    canvas, mask = canvas_of(edit), mask_of(edit)
    expected_px = (canvas.shape[1], canvas.shape[0])
    counts = dict.fromkeys(("outside", "changed_outside", "inside", "changed_inside"), 0)
    if result.size == expected_px:
        changed = (np.asarray(result.convert("RGB")) != canvas).any(axis=2)
        inside = np.ones_like(changed) if mask is None else mask
        counts = {
            "outside": int((~inside).sum()),
            "changed_outside": int(changed[~inside].sum()),
            "inside": int(inside.sum()),
            "changed_inside": int(changed[inside].sum()),
        }
    card = made.get("edit")
    return Outcome(
        seed=edit.seed,
        kind=edit.kind,
        size_px=result.size,
        expected_px=expected_px,
        is_pasted=mask is not None and edit.fields.get("paste_back") is not False,
        strength=None if card is None else card["strength"],
        **counts,
    )


def run(url: str, key: str, seeds: Iterable[int]) -> list[Outcome]:
    """Make the edits of some seeds, several at once."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120, max_retries=10)

    def one(seed: int) -> Outcome:
        edit = draw(seed)
        try:
            return outcome_of(edit, *send(client, edit))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {edit.kind}: {error}") from error

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, seeds))


def main() -> None:
    url, key, first, count = sys.argv[1:]
    found = run(url, key, range(int(first), int(first) + int(count)))
    result = {"version": openai.__version__, "outcomes": [asdict(one) for one in found]}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
