"""A field of a request passes through five files of code at most: one is added to a copy, and used.

The field is made up: `vignette` darkens an image towards its corners.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DARKENED = """

def _darkened(pixels, share):
    import numpy as np
    across, down = (np.linspace(-1, 1, side) ** 2 for side in pixels.shape[1::-1])
    kept = 1 - share * (down[:, None] + across) / 2
    return (pixels * kept[..., None]).astype(np.uint8)
"""
# file -> what stands there, and what comes behind it
CHANGES: dict[str, list[tuple[str, str]]] = {
    "ray_cluster/requests/image.py": [
        ("    upscale: UpscaleUse | None = None\n", "    vignette: float = 0.0\n"),
        (
            '            recipe["upscale"] = str(self.upscale.factor)\n',
            '        if self.vignette:\n            recipe["vignette"] = repr(self.vignette)\n',
        ),
    ],
    "ray_cluster/api/input/schemas.py": [
        (
            '        "an upscaler; 1 if absent.",\n    )\n',
            '    vignette: float | None = optional("Darkens the corners.", ge=0, le=1)\n',
        ),
    ],
    "ray_cluster/api/resolve/generation.py": [
        ("            terms=terms,\n", "            vignette=fields.vignette or 0.0,\n"),
    ],
    "ray_cluster/cli/images/generate.py": [
        ('    *("control", "upscale"),\n', '    "vignette",\n'),
        (
            "    upscale: _Upscale = None,\n",
            '    vignette: Annotated[float | None, _image("Darkens the corners.")] = None,\n',
        ),
    ],
    "ray_cluster/replica/delivery.py": [
        (
            "from ray_cluster.requests import ImageRequest, ImageResult, OutputSpec\n",
            DARKENED,
        ),
        (
            "        request = event.request\n",
            "        event = replace(event, pixels=_darkened(event.pixels, request.vignette))\n",
        ),
    ],
}


def test_the_field_still_fits_where_it_is_added() -> None:
    for name, changes in CHANGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [before for before, _ in changes if before not in text] == [], name


def changed_tree(folder: Path) -> Path:
    """A copy of the code with the field."""
    for name in ("ray_cluster", "policies", "kernels", "deployments"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name, changes in CHANGES.items():
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for before, more in changes:
            assert before in text, (name, before)
            text = text.replace(before, before + more, 1)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_made_up_field_works_from_the_command_line_to_the_pixels(tmp_path: Path) -> None:
    tree = changed_tree(tmp_path / "tree")
    environment = os.environ | {"PYTHONPATH": str(tree)}

    def generate(*options: str) -> None:
        words = ["generate", "a red circle on a white background", "--steps", "3", *options]
        command = [sys.executable, "-m", "ray_cluster.cli", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    from PIL import Image

    generate("--seed", "5", "-o", "plain.png")
    generate("--seed", "5", "--vignette", "1.0", "-o", "dark.png")
    generate("--like", "dark.png", "-o", "again.png")
    plain, dark, again = (
        Image.open(tmp_path / f"{name}.png") for name in ("plain", "dark", "again")
    )
    assert dark.info["ray_cluster:vignette"] == "1.0"
    assert again.tobytes() == dark.tobytes()
    middle = (plain.width // 2, plain.height // 2)
    assert sum(plain.getpixel((0, 0))) > 300
    assert sum(dark.getpixel((0, 0))) == 0
    assert sum(dark.getpixel(middle)) > 0.9 * sum(plain.getpixel(middle))
