"""Models for the engine's tests, each made and loaded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.dits import DiTReference
from tests.engine.failing import requests_with_a_bad_one
from tests.engine.harness import load, pool
from tests.engine.random_dits import save_flux, save_sd3
from tests.engine.random_models import save_sd, save_sdxl
from tests.engine.reference import Reference
from tests.engine.references import LookingReference
from tests.engine.reusing import Company
from tests.engine.staged import StagedModel

FAMILIES = ("sd", "sd15", "sdxl", "shapes")
DITS = ("sd3", "sd35", "flux", "schnell", "shapes-sd3")
# FLUX with as many heads as there are ranks
WIDE_FLUX = "wide-flux"
# FLUX that looks at pictures, and one that sees masked images
KONTEXT, FILL = "kontext", "fill"


# of each test that knows several, the first of these is made by `make test`; the others are slow
_UNETS = ("sd", "sd15", "inpaint", "sdxl", "shapes")
_TRANSFORMERS = ("sd3", "flux", "sd35", "schnell", "shapes-sd3")
# of samplers one that keeps nothing, one that draws noise and one that remembers earlier steps
_SAMPLERS = ("ddim", "euler_ancestral", "dpmpp_2m")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one UNet, one transformer and three samplers to each test; the whole matrix is slow."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and Path(__file__).parent in item.path.parents:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        there = {model for item in cases if (model := _named(item, _UNETS + _TRANSFORMERS))}
        kept = {next((one for one in kind if one in there), "") for kind in (_UNETS, _TRANSFORMERS)}
        samplers = {_named(item, SAMPLER_NAMES) for item in cases}
        for item in cases:
            model, sampler = _named(item, _UNETS + _TRANSFORMERS), _named(item, SAMPLER_NAMES)
            if (model and model not in kept) or (
                sampler not in _SAMPLERS and samplers.issuperset(_SAMPLERS)
            ):
                item.add_marker(pytest.mark.slow)


def _named(item: pytest.Item, names: Collection[str]) -> str | None:
    """Return which of some names a test is made with, if any."""
    values = map(str, item.callspec.params.values())  # type: ignore[attr-defined]
    return next((one for one in values if one in names), None)


class Zoo:
    """Folders, loaded models and diffusers references by name, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._models: dict[str, LoadedModel] = {}
        self._references: dict[str, Reference] = {}

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = self._make(name)
        return self._folders[name]

    def model(self, name: str) -> LoadedModel:
        if name not in self._models:
            # FLUX's own default size is not the folder's to say
            self._models[name] = load(pool(self.folder(name), defaults={"size": "64x64"}))
        return self._models[name]

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            kind = DiTReference if name in (*DITS, WIDE_FLUX, FILL) else Reference
            kind = LookingReference if name == KONTEXT else kind
            self._references[name] = kind(self.folder(name))
        return self._references[name]

    def _make(self, name: str) -> Path:
        folder = self._root / name
        match name:
            case "sd":
                return save_sd(folder)
            case "sd15":
                return save_sd(folder, zero_snr=False)
            case "inpaint":
                return save_sd(folder, zero_snr=False, inpaints=True)
            case "sdxl":
                return save_sdxl(folder)
            case "sd3" | "sd35":
                return save_sd3(folder, is_35=name == "sd35")
            case "flux" | "schnell" | "wide-flux" | "kontext" | "fill":
                return save_flux(
                    folder,
                    is_distilled=name != "schnell",
                    num_heads=4 if name == WIDE_FLUX else 2,
                    is_kontext=name == KONTEXT,
                    is_fill=name == FILL,
                )
        built_in = builtin_folder("shapes-sd" if name == "shapes" else name)
        assert built_in is not None
        return built_in


@pytest.fixture(scope="session", autouse=True)
def _one_quiet_thread() -> None:
    prepare_threads(1)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def companies(zoo: Zoo) -> Callable[[str], Company]:
    return cache(lambda name: Company(zoo.model(name)))


@pytest.fixture(params=("shapes", "sdxl", "shapes-sd3", "sd35", "flux"))
def company(request: pytest.FixtureRequest, companies: Callable[[str], Company]) -> Company:
    """Each kind of model in turn, for rows that reuse."""
    return companies(str(request.param))


@pytest.fixture(scope="session")
def small(companies: Callable[[str], Company]) -> Company:
    """The random Stable Diffusion model, for rows that reuse."""
    return companies("sd")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    """Each model in turn."""
    return request.param


@pytest.fixture(params=DITS)
def dit(request: pytest.FixtureRequest) -> Any:
    """Each diffusion transformer in turn."""
    return request.param


@pytest.fixture
def sd(zoo: Zoo) -> LoadedModel:
    """The random Stable Diffusion model."""
    return zoo.model("sd")


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Notes a measured value in the test's report."""
    return lambda name, value: request.node.user_properties.append((name, value))


@pytest.fixture(scope="module")
def staged(zoo: Zoo) -> StagedModel:
    return StagedModel(zoo.model("sd"), requests_with_a_bad_one())


@pytest.fixture(scope="module")
def pixels(staged: StagedModel) -> dict[str, Any]:
    return dict(staged.pixels())


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    """The staged model as if nothing had been done to it."""
    staged.calls.clear()
    staged.before.clear()
    staged.nan_in.clear()
    yield staged
    staged.before.clear()
    staged.nan_in.clear()
