"""Makes the picture of docs/edits.md: template, mask, result and difference, side by side.

``python -m benchmarks.edit_picture`` needs no service; it makes both images in processes of its own
and fails if a pixel outside the mask has changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Pixels = npt.NDArray[np.uint8]

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "edited.png"
TEMPLATE_PROMPT = "a large red circle left of a large green star on a white background"
EDIT_PROMPT = "a large red circle left of a large blue square on a white background"
SIZE_PX = (128, 128)
# right half of the template, with a border that stays
EDITED_PX = (68, 16, 124, 112)
TILE_PX, BORDER_PX, CAPTION_PX = 230, 14, 30
PAPER, INK = "#f4f4f4", "#202020"


def main(arguments: list[str] | None = None) -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help="file to write")
    parser.add_argument("--seed", type=int, default=7, help="of both images")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        tiles = edit(Path(name), options.seed)
    side_by_side(tiles).save(options.out, optimize=True)
    print(options.out)


def edit(folder: Path, seed: int) -> dict[str, Pixels]:
    """Return the pictures by their captions; ValueError if a pixel changed that must not."""
    template, mask, result = (folder / f"{name}.png" for name in ("template", "mask", "result"))
    size = "{}x{}".format(*SIZE_PX)
    _generate(TEMPLATE_PROMPT, "--size", size, "--seed", seed, "-o", template)
    shown = _pixels(template)
    alpha = np.full(shown.shape[:2], 255, np.uint8)
    left, top, right, bottom = EDITED_PX
    alpha[top:bottom, left:right] = 0
    Image.fromarray(np.dstack([shown, alpha])).save(mask)
    _generate(EDIT_PROMPT, "--edit", template, "--mask", mask, "--seed", seed, "-o", result)
    made = _pixels(result)
    changed = np.abs(made.astype(np.int16) - shown).astype(np.uint8)
    if changed[alpha == 255].any():
        raise ValueError("pixels outside the mask have changed")
    return {
        f"template: {TEMPLATE_PROMPT}": shown,
        "mask: transparent where the image is edited": _on_chequers(shown, alpha),
        f"result: {EDIT_PROMPT}": made,
        "difference: black where no bit has changed": changed,
    }


def side_by_side(tiles: dict[str, Pixels]) -> Image.Image:
    """Return the pictures in a row, with their captions below."""
    font = ImageFont.load_default(12)
    lines = {caption: _wrapped(caption, font) for caption in tiles}
    height_px = TILE_PX + 2 * BORDER_PX + CAPTION_PX + 8
    width_px = len(tiles) * (TILE_PX + BORDER_PX) + BORDER_PX
    picture = Image.new("RGB", (width_px, height_px), PAPER)
    drawing = ImageDraw.Draw(picture)
    for index, (caption, pixels) in enumerate(tiles.items()):
        left_px = BORDER_PX + index * (TILE_PX + BORDER_PX)
        tile = Image.fromarray(pixels).resize((TILE_PX, TILE_PX), Image.Resampling.NEAREST)
        picture.paste(tile, (left_px, BORDER_PX))
        below_px = BORDER_PX + TILE_PX + 6
        drawing.text((left_px, below_px), lines[caption], fill=INK, font=font)
    return picture


def _generate(prompt: str, *options: object) -> None:
    command = [sys.executable, "-m", "ray_cluster.cli", "generate", prompt, *map(str, options)]
    subprocess.run(command, check=True, timeout=600)


def _pixels(path: Path) -> Pixels:
    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def _on_chequers(pixels: Pixels, alpha: Pixels) -> Pixels:
    """Return an image with the pattern that programs show where it is transparent."""
    rows, columns = np.indices(alpha.shape) // 8
    chequers = np.where((rows + columns) % 2, 255, 200).astype(np.uint8)[..., None]
    shown: Pixels = np.where((alpha == 0)[..., None], chequers, pixels)
    return shown


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > TILE_PX:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


if __name__ == "__main__":
    main()
