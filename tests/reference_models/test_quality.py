"""The attribute classifier reads renders right, and states no shape where there is none."""

import pytest
import torch

from ray_cluster.quality.classifier import AttributeClassifier, load_classifier, read_pictures
from ray_cluster.quality.measure import ATTRIBUTES, ClassifierFigures, measure_classifier
from ray_cluster.reference_models.render import render
from ray_cluster.reference_models.scenes import Scene, SceneObject


@pytest.fixture(scope="module")
def classifier() -> AttributeClassifier:
    return load_classifier()


@pytest.fixture(scope="module")
def figures(classifier: AttributeClassifier) -> ClassifierFigures:
    return measure_classifier(classifier, seed=99, count=400)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_fresh_renders_are_read_right(attribute: str, figures: ClassifierFigures) -> None:
    assert figures.right[attribute] >= 0.99


@pytest.mark.parametrize("kind", ["noise", "blob", "gradient", "empty"])
def test_no_shape_is_stated_where_there_is_none(kind: str, figures: ClassifierFigures) -> None:
    assert figures.confident[kind] <= 0.02


# two equal objects that coincide blend into one, so some of these do show a shape
@pytest.mark.parametrize("kind", ["blend", "several"])
def test_a_shape_is_hardly_stated_where_there_are_two(
    kind: str, figures: ClassifierFigures
) -> None:
    assert figures.confident[kind] <= 0.05


def test_a_batch_is_read_like_its_pictures(classifier: AttributeClassifier) -> None:
    things = [
        SceneObject("ring", "blue", "small", "top"),
        SceneObject("star", "red", "large", "left"),
    ]
    pictures = render([Scene((thing,), "gray") for thing in things], width=96, height=64)
    readings = read_pictures(classifier, pictures)
    assert readings == [read_pictures(classifier, one[None])[0] for one in pictures]
    assert [(r.shape, r.colour, r.size, r.position) for r in readings] == [
        (t.shape, t.colour, t.size, t.position) for t in things
    ]


def test_plain_white_has_a_background_and_nothing_else(classifier: AttributeClassifier) -> None:
    reading = read_pictures(classifier, torch.full((1, 3, 64, 64), 0.97))[0]
    assert reading.background == "white"
    assert reading.shape is None
    assert reading.colour is None
