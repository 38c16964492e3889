"""The attribute classifier reads renders right, and states no shape where there is none."""

import pytest
import torch
from torchmetrics.functional.image import structural_similarity_index_measure
from torchmetrics.image.fid import FrechetInceptionDistance

from ray_cluster.quality.classifier import AttributeClassifier, load_classifier, read_pictures
from ray_cluster.quality.distances import (
    frechet_distance,
    similarity,
)
from ray_cluster.quality.render import Jitter, render
from ray_cluster.quality.scenes import Scene, SceneObject
from ray_cluster.quality.suite import suite_prompts
from recipes.discriminators.classifier_examples import blur
from recipes.discriminators.classifier_figures import (
    ATTRIBUTES,
    ClassifierFigures,
    measure_classifier,
)


@pytest.fixture(scope="module")
def classifier() -> AttributeClassifier:
    return load_classifier()


@pytest.fixture(scope="module")
def figures(classifier: AttributeClassifier) -> ClassifierFigures:
    return measure_classifier(classifier, seed=99, count=150)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_fresh_renders_are_read_right(attribute: str, figures: ClassifierFigures) -> None:
    assert figures.single[attribute] >= 0.99
    assert figures.several[attribute] >= 0.98
    assert figures.styled[attribute] >= 0.97


@pytest.mark.parametrize("kind", ["noise", "blob", "gradient", "empty"])
def test_no_shape_is_stated_where_there_is_none(kind: str, figures: ClassifierFigures) -> None:
    assert figures.confident[kind] <= 0.02


def test_a_shape_is_hardly_stated_where_two_pictures_are_mixed(figures: ClassifierFigures) -> None:
    # two equal objects that coincide do show a shape; nine positions are read, so two may mislead
    assert figures.confident["blend"] <= 0.10


def test_a_batch_is_read_like_its_pictures(classifier: AttributeClassifier) -> None:
    scenes = [
        Scene((SceneObject("ring", "blue", "small", "top"),), "gray"),
        Scene(
            (
                SceneObject("star", "red", "large", "top left"),
                SceneObject("cross", "cyan", "small", "bottom right"),
            ),
            "striped",
        ),
    ]
    pictures = render(scenes, width=96, height=64)
    readings = read_pictures(classifier, pictures)
    assert readings == [read_pictures(classifier, one[None])[0] for one in pictures]
    for scene, reading in zip(scenes, readings, strict=True):
        seen = {SceneObject(r.shape, r.colour, r.size, r.position) for r in reading.objects}  # type: ignore[arg-type]
        assert seen == set(scene.objects)
        assert reading.background == scene.background


def test_plain_white_has_a_background_and_nothing_else(classifier: AttributeClassifier) -> None:
    reading = read_pictures(classifier, torch.full((1, 3, 64, 64), 0.97))[0]
    assert reading.background == "white"
    assert reading.objects == ()


def easy_renders(count: int, seed: int) -> torch.Tensor:
    scenes = [prompt.scene for prompt in suite_prompts("easy", count)]
    return render(scenes, width=64, height=64, jitter=Jitter(), seed=seed)


def test_a_picture_is_similar_to_itself_and_less_so_with_blur() -> None:
    sharp = easy_renders(8, seed=1)
    little, much = blur(sharp, 0.6), blur(sharp, 2.0)
    assert torch.allclose(similarity(sharp, sharp), torch.ones(8))
    assert (similarity(little, sharp) > similarity(much, sharp)).all()


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_the_similarity_is_that_of_torchmetrics(size: tuple[int, int]) -> None:
    scenes = [prompt.scene for prompt in suite_prompts("hard", 4)]
    sharp = render(scenes, width=size[0], height=size[1], jitter=Jitter(), seed=1)
    noise = torch.randn(sharp.shape, generator=torch.Generator().manual_seed(1))
    for other in (
        sharp,
        blur(sharp, 1.0),
        (sharp + 0.2 * noise).clamp(0, 1),
        sharp.mean() + sharp * 0,
    ):
        theirs = structural_similarity_index_measure(
            other.double(), sharp.double(), data_range=1.0, reduction="none"
        )
        assert torch.allclose(similarity(other, sharp), theirs.float(), atol=1e-6)


class Features(torch.nn.Module):
    """The classifier's features in the shape that torchmetrics wants."""

    num_features = 192

    def __init__(self, classifier: AttributeClassifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        slots, overall = self.classifier.describe(pictures)
        return torch.cat([slots.mean(1), overall], 1)


def test_the_frechet_distance_is_that_of_torchmetrics(classifier: AttributeClassifier) -> None:
    real, more, third = (easy_renders(100, seed) for seed in (1, 2, 3))
    blurred = blur(third, 2.0)
    found = frechet_distance(classifier, blurred, real, more)
    theirs = FrechetInceptionDistance(Features(classifier))
    theirs.update(real, real=True)
    theirs.update(blurred, real=False)
    assert found.value == pytest.approx(float(theirs.compute()), rel=1e-4)
    assert frechet_distance(classifier, more, real, more).value == found.floor
    assert found.value > 3 * found.floor
    with pytest.raises(ValueError, match="must have the same; got 100, 99 and 100"):
        frechet_distance(classifier, third, real[1:], more)


def test_pictures_of_other_sizes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shapes must agree"):
        similarity(torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 96))
