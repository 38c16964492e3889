"""Maps of ControlNets: sizes, detectors, and what is refused."""

from __future__ import annotations

import io
import random
import sys
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder, control_map
from ray_cluster.imaging.detectors import DETECTOR_NAMES, Detectors, Pixels
from ray_cluster.imaging.edit_images import edit_pixels
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.policies.edits import Box
from ray_cluster.quality.render import render
from ray_cluster.quality.scenes import sample_training_scene
from ray_cluster.requests import BlobRef, Edit
from recipes.networks.controlnet import edge_map
from tests.imaging.hostile import bombs
from tests.imaging.pictures import file_of, gradient

MOST = 1 << 20


def pixels_of(made: ControlMap) -> Pixels:
    with Image.open(io.BytesIO(made.png)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert image.size == made.size_px
        return np.array(image)


def made_of(data: bytes, order: MapOrder) -> Pixels:
    return pixels_of(control_map(data, order, MOST))


def test_canny_makes_the_maps_that_the_bundled_controlnet_was_trained_on() -> None:
    rng = random.Random(5)
    scenes = [sample_training_scene(rng, 0.5) for _ in range(20)]
    pictures = render(scenes, width=96, height=64)
    wanted = (edge_map(pictures) * 255).byte().permute(0, 2, 3, 1).numpy()
    sent = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for picture, edges in zip(sent, wanted, strict=True):
        assert edges.any()
        assert np.array_equal(made_of(file_of(picture), MapOrder("canny", (96, 64))), edges)


def test_an_image_is_resized_as_diffusers_resizes_control_images() -> None:
    from diffusers.image_processor import VaeImageProcessor

    picture = gradient(100, 70)
    processor = VaeImageProcessor(do_convert_rgb=True, do_normalize=False)
    wanted = processor.resize(Image.fromarray(picture), height=64, width=96)
    made = made_of(file_of(picture), MapOrder("none", (96, 64)))
    assert np.array_equal(made, np.array(wanted))
    # without a size: as it is
    assert np.array_equal(made_of(file_of(picture), MapOrder("none", None)), picture)


@pytest.mark.parametrize(
    ("window", "work_px"),
    [(None, (96, 64)), (Box(10, 4, 48, 40), (48, 40)), (Box(10, 4, 80, 60), (64, 64))],
)
def test_the_map_of_an_edit_shows_what_the_model_sees_of_its_template(
    window: Box | None, work_px: tuple[int, int]
) -> None:
    data = file_of(gradient(120, 80))
    edit = Edit(BlobRef("", 0), canvas_px=(96, 64), schedule_steps=10, window=window)
    wanted = edit_pixels(data, None, edit, work_px).work
    made = made_of(data, MapOrder("none", work_px, edit.canvas_px, window))
    assert np.array_equal(made, wanted)


def test_detectors_for_drawings_turn_dark_strokes_white() -> None:
    drawing = np.full((32, 32, 3), 250, np.uint8)
    drawing[10:14, 4:28] = (90, 20, 30)
    inverted = made_of(file_of(drawing), MapOrder("invert", (32, 32)))
    assert np.array_equal(inverted, 255 - drawing)
    strokes = made_of(file_of(drawing), MapOrder("scribble", (32, 32)))
    assert sorted(np.unique(strokes)) == [0, 255]
    assert strokes[10:14, 4:28].all()
    assert strokes.sum() == 255 * 3 * 4 * 24
    # what is transparent is white paper
    clear = np.dstack([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8), np.uint8)])
    buffer = io.BytesIO()
    Image.fromarray(clear).save(buffer, "PNG")
    assert not made_of(buffer.getvalue(), MapOrder("scribble", (8, 8))).any()


def test_a_coder_process_makes_the_same_map_and_refuses_by_name() -> None:
    data = file_of(gradient(80, 60))
    order = MapOrder("canny", (64, 64), (80, 64), Box(0, 0, 64, 64), param="controlnets[1].image")
    with ImageCoder() as coder:
        made = coder.control_map(data, order, MOST).result(60)
        assert made == control_map(data, order, MOST)
        for bad in (*bombs(), data[: len(data) // 2], b"no image"):
            with pytest.raises(InvalidRequest) as caught:
                coder.control_map(bad, order, MOST).result(60)
            assert caught.value.param == "controlnets[1].image"
        with pytest.raises(InvalidRequest, match="ray-cluster\\[preprocessors\\]") as caught:
            coder.control_map(data, MapOrder("openpose", None), MOST).result(60)
        assert (caught.value.param, caught.value.code) == ("preprocess", "detector_unavailable")


# controlnet-aux, which cannot stand beside a torch of another build


class FakeDetector:
    """Stands in for all of its detectors: says what it was called with."""

    loaded: ClassVar[list[str]] = []

    @classmethod
    def from_pretrained(cls, folder: str) -> FakeDetector:
        cls.loaded.append(folder)
        return cls()

    def __call__(self, pixels: Pixels, **options: object) -> Pixels:
        assert options == {
            "detect_resolution": 512,
            "image_resolution": 512,
            "output_type": "np",
        }
        # sides that are multiples of 64
        return np.full((512, 768, 3), pixels[0, 0, 0], np.uint8)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    fake = types.ModuleType("controlnet_aux")
    fake.__spec__ = types.SimpleNamespace(loader=None)  # type: ignore[assignment]
    fake.HEDdetector = FakeDetector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "controlnet_aux", fake)
    monkeypatch.setattr(FakeDetector, "loaded", [])
    return fake


def test_a_network_is_loaded_once_from_its_folder_and_its_map_brought_to_size(
    library: types.ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "ControlNetHED.pth").touch()
    picture = np.full((40, 60, 3), 77, np.uint8)
    for _ in range(2):
        made = made_of(file_of(picture), MapOrder("hed", (96, 64), folder=str(tmp_path)))
        assert made.shape == (64, 96, 3)
        assert np.unique(made) == [77]
    assert FakeDetector.loaded == [str(tmp_path)]
    assert made_of(file_of(picture), MapOrder("hed", None, folder=str(tmp_path))).shape[:2] == (
        40,
        60,
    )
    assert Detectors(str(tmp_path)).available() == ("none", "canny", "invert", "scribble", "hed")


@pytest.mark.parametrize(
    ("folder", "said"),
    [("", "has no preprocessors.folder"), ("/nowhere", "lacks sk_model.pth, sk_model2.pth")],
)
def test_a_network_without_weights_is_refused_before_it_could_fetch_them(
    library: types.ModuleType, folder: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Detectors(folder).check("lineart", "preprocess")
    assert set(Detectors(folder).available()) < set(DETECTOR_NAMES)


def test_a_library_that_does_not_suit_torch_is_a_clear_error(
    library: types.ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "table5_pidinet.pth").touch()
    # this one lacks the class, as a broken import leaves it
    with pytest.raises(InvalidRequest, match="controlnet-aux does not work here") as caught:
        Detectors(str(tmp_path)).detect(gradient(), "pidinet", "preprocess")
    assert caught.value.code == "detector_unavailable"
