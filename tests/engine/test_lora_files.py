"""What a LoRA file says is what is read, or the file is refused by name, however it is broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ray_cluster.engine.adapters.lora_files import LoraFactors, LoraReader
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.harness import CONTROL_FACTOR
from tests.engine.random_loras import ATTENTION, OF_ENCODER, Pairs, kohya_keys, pairs, peft_keys

_TOLERANCE = 1e-6
_TYPES = (torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
Tensors = dict[str, Tensor]


class Subject:
    """A base with its diffusers pipeline, and files for it."""

    def __init__(self, zoo: Zoo, name: str, folder: Path) -> None:
        self.base = zoo.folder(name)
        self.pipeline = zoo.reference(name).pipeline
        self.path = folder / "one.safetensors"
        self._reader = LoraReader()

    def read(self, tensors: Tensors, header: str = "") -> LoraFactors:
        metadata = {"lora_adapter_metadata": header} if header else None
        whole = {
            key: one.clone(memory_format=torch.contiguous_format) for key, one in tensors.items()
        }
        save_file(whole, self.path, metadata=metadata)
        return self.read_as_it_is()

    def read_as_it_is(self) -> LoraFactors:
        return self._reader.read(self.path, self.base)


@pytest.fixture
def sd(zoo: Zoo, tmp_path: Path) -> Subject:
    return Subject(zoo, "sd", tmp_path)


def error(factors: LoraFactors, component: str, layers: Pairs, alphas: dict[str, float]) -> float:
    """How far factors are from ``alpha / rank * up @ down``, written out."""
    found = factors.by_component[component]
    assert found.keys() == layers.keys()
    gaps = []
    for path, (down, up) in layers.items():
        expected = alphas[path] / down.shape[0] * torch.tensordot(up.flatten(1), down, 1)
        one = found[path]
        gaps.append((torch.tensordot(one.expand, one.shrink, 1) - expected).abs().max())
    return float(max(gaps))


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_each_layer_has_its_own_alpha_and_rank(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """For most layers diffusers takes the commonest alpha: this is held against the formula."""
    subject = Subject(zoo, name, tmp_path)
    parts = [("lora_unet", "unet", (*ATTENTION, "conv1", "conv2", "proj_out"))]
    encoders = [("lora_te_text_model", "text_encoder")]
    if name == "sdxl":
        encoders = [("lora_te1_text_model", "text_encoder"), ("lora_te2", "text_encoder_2")]
    parts += [(prefix, encoder, OF_ENCODER) for prefix, encoder in encoders]
    tensors: Tensors = {}
    layers: dict[str, Pairs] = {}
    alphas: dict[str, dict[str, float]] = {}
    for prefix, component, endings in parts:
        layers[component], alphas[component] = {}, {}
        model = subject.pipeline.components[component]
        for rank, ending in enumerate(endings, 2):
            some = pairs(model, (ending,), rank, seed=rank)
            for index, (path, pair) in enumerate(some.items()):
                alpha = 0.5 + rank + index % 3
                tensors |= kohya_keys(prefix, {path: pair}, alpha)
                alphas[component][path] = alpha
            layers[component] |= some
    factors = subject.read(tensors)
    for component, some in layers.items():
        assert error(factors, component, some, alphas[component]) <= _TOLERANCE
        # alphas that are ignored
        ranks = {path: float(down.shape[0]) for path, (down, _) in some.items()}
        assert error(factors, component, some, ranks) > CONTROL_FACTOR * _TOLERANCE
        # the commonest for all
        common = dict.fromkeys(some, alphas[component][next(iter(some))])
        assert error(factors, component, some, common) > CONTROL_FACTOR * _TOLERANCE
        # factors of another layer of the same shape
        paths = [path for path in some if path.endswith(endings_of(component))]
        swapped = some | dict(zip(paths, [some[path] for path in reversed(paths)], strict=True))
        assert error(factors, component, swapped, alphas[component]) > CONTROL_FACTOR * _TOLERANCE
    assert len(factors.ranks) > 3


def endings_of(component: str) -> str:
    return "attn1.to_q" if component == "unet" else "q_proj"


def plain(subject: Subject) -> Tensors:
    tensors = peft_keys("unet", pairs(subject.pipeline.unet, ("to_q", "conv1")))
    return tensors | peft_keys(
        "text_encoder", pairs(subject.pipeline.text_encoder, ("q_proj", "fc1"))
    )


def kohya(subject: Subject) -> Tensors:
    layers = pairs(subject.pipeline.unet, ("attn1.to_q", "conv1"))
    encoder = pairs(subject.pipeline.text_encoder, ("q_proj",))
    return kohya_keys("lora_unet", layers, 1.5) | kohya_keys("lora_te_text_model", encoder, 2.0)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("unet.conv_in.dora_scale", "DoRA"),
        ("unet.conv_in.lora_magnitude_vector.weight", "DoRA"),
        ("lora_unet_conv_in.hada_w1_a", "LoHa"),
        ("lora_unet_conv_in.lokr_w1", "LoKr"),
        ("lora_unet_conv_in.lora_mid.weight", "Tucker"),
        ("lora_controlnet", "control-LoRA"),
        ("unet.conv_in.diff", "full differences"),
        ("unet.conv_in.diff_b", "full differences"),
        ("unet.conv_in.oft_blocks", "OFT"),
        # weights that are no factors
        ("unet.conv_in.weight", "one.safetensors"),
        ("text_encoder_3.encoder.layers.0.mlp.fc1.lora_A.weight", "text_encoder_3"),
        ("vae.decoder.conv_in.lora_A.weight", "vae.decoder"),
    ],
)
def test_what_is_beside_a_whole_lora_is_refused_by_name(sd: Subject, key: str, said: str) -> None:
    sd.read(plain(sd))
    with pytest.raises(ModelUnsupported, match=said):
        sd.read(plain(sd) | {key: torch.ones(2, 2)})


@pytest.mark.parametrize("part", ["A", "B"])
@pytest.mark.parametrize("component", ["unet", "text_encoder"])
def test_one_factor_without_the_other_is_refused(sd: Subject, component: str, part: str) -> None:
    tensors = plain(sd)
    key = next(key for key in tensors if key.startswith(component) and f"lora_{part}" in key)
    with pytest.raises(ModelUnsupported, match=key.split(".")[-3]):
        sd.read({name: one for name, one in tensors.items() if name != key})


def test_alphas_that_belong_to_no_layer_or_lack_for_some_are_refused(
    zoo: Zoo, tmp_path: Path
) -> None:
    flux = Subject(zoo, "flux", tmp_path)
    tensors = peft_keys("transformer", pairs(flux.pipeline.transformer, ("to_q", "to_k")))
    alphas = {
        key.replace("lora_A.weight", "alpha"): torch.tensor(6.0) for key in tensors if "_A" in key
    }
    flux.read(tensors | alphas)
    with pytest.raises(ModelUnsupported, match=r"nothing\.alpha"):
        flux.read(tensors | alphas | {"transformer.nothing.alpha": torch.tensor(6.0)})
    del alphas[next(iter(alphas))]
    with pytest.raises(ModelUnsupported, match="no alpha"):
        flux.read(tensors | alphas)


@pytest.mark.parametrize("which", ["A", "B"])
def test_factors_of_different_ranks_are_refused(sd: Subject, which: str) -> None:
    tensors = plain(sd)
    for component in ("unet", "text_encoder"):
        key = next(key for key in tensors if key.startswith(component) and f"lora_{which}" in key)
        one = tensors[key]
        longer = torch.cat([one, one[:1]]) if which == "A" else torch.cat([one, one[:, :1]], 1)
        with pytest.raises(ModelUnsupported, match="are of other sizes"):
            sd.read(tensors | {key: longer})


def test_a_lora_of_another_base_is_refused(zoo: Zoo, sd: Subject) -> None:
    xl, sd3 = zoo.reference("sdxl").pipeline, zoo.reference("sd3").pipeline
    for tensors in (
        peft_keys("unet", pairs(xl.unet, ATTENTION)),
        kohya_keys("lora_unet", pairs(xl.unet, ATTENTION), 1.0),
        peft_keys("transformer", pairs(sd3.transformer, ATTENTION)),
        plain(sd) | peft_keys("text_encoder_2", pairs(xl.text_encoder_2, ("fc1",))),
        {},
    ):
        with pytest.raises(ModelUnsupported, match=r"one\.safetensors"):
            sd.read(tensors)


def changed(
    tensors: Tensors, numbers: random.Random, num_keys: int
) -> Iterator[tuple[str, Tensors]]:
    """Yield files in which one thing is wrong, named for it."""
    keys = list(tensors)
    for key in numbers.sample(keys, num_keys):
        one = tensors[key]
        others = {name: other for name, other in tensors.items() if name != key}
        yield f"without {key}", others
        shapes = [one.flatten(), one[None], one[..., None, None], torch.zeros(0), one.sum()]
        if one.ndim > 1:
            shapes += [one.transpose(0, 1), one[:1], one[:0], torch.cat([one, one], 1)]
        for shape in shapes:
            yield f"{tuple(shape.shape)} for {key}", tensors | {key: shape}
        for kind in _TYPES:
            yield f"{kind} for {key}", tensors | {key: one.to(kind)}
        for number in (torch.nan, torch.inf):
            yield f"{number} for {key}", tensors | {key: one * number}
        for old, new in ((".", "_"), (".weight", ""), ("lora", "loro"), ("0", "7"), ("_A", "_B")):
            yield f"{key} with {new} for {old}", others | {key.replace(old, new): one}
        yield f"{key} twice", tensors | {key.replace("unet", "text_encoder"): one}


def headers() -> Iterator[str]:
    yield from ("{", "[]", "1", "{}", '{"unet": {"r": 3}}', '{"unet.r": NaN}', '"x"')
    plain = {"r": 3, "lora_alpha": 3, "target_modules": ["to_q", "conv1"]}
    changes: list[dict[str, Any]] = [{"r": one} for one in ("3", -1, 0, 1.5, True, 4, None, [3])]
    changes += [{"lora_alpha": one} for one in ("x", None, [1], {})]
    changes += [{"rank_pattern": one} for one in ({"(": 3}, [3], {"to_q": "x"}, {"to_q": 9})]
    changes += [{"alpha_pattern": one} for one in ({"[": 3}, {"(a|a)+$": 3}, {"to_q": [1]})]
    changes += [{"target_modules": one} for one in ("(", "(\\w+\\.?)+!", [], None, 5)]
    changes += [{"use_rslora": "x"}, {"peft_type": "LOHA"}, {"bias": "all"}, {"x": 1}]
    for one in changes:
        yield json.dumps({f"unet.{key}": value for key, value in (plain | one).items()})


def damaged(whole: bytes, numbers: random.Random, count: int) -> Iterator[bytes]:
    head = 8 + int.from_bytes(whole[:8], "little")
    yield from (whole[:count] for count in (0, 1, 8, 9, head, head + 10, len(whole) - 1))
    yield from (whole + b"x", b"\xff" * 8 + whole[8:], whole[::-1])
    for _ in range(count):
        bad = bytearray(whole)
        for _ in range(numbers.randint(1, 3)):
            bad[numbers.randrange(head)] = numbers.randrange(256)
        yield bytes(bad)


@pytest.mark.parametrize(
    ("num_keys", "num_damaged", "least"),
    [(1, 10, 100), pytest.param(2, 80, 200, marks=pytest.mark.slow)],
)
def test_broken_files_are_refused_or_read_as_they_are(
    sd: Subject, num_keys: int, num_damaged: int, least: int
) -> None:
    """Only one kind of error comes out, and what is accepted has the shapes of its layers."""
    numbers = random.Random(0)
    shapes = {
        f"{name}.{path}": tuple(layer.weight.shape)
        for name in ("unet", "text_encoder")
        for path, layer in sd.pipeline.components[name].named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }
    outcomes = {"read": 0, "refused": 0}

    def attempt(read: Any, *given: Any) -> None:
        try:
            factors = read(*given)
        except ModelUnsupported:
            outcomes["refused"] += 1
            return
        outcomes["read"] += 1
        for name, layers in factors.by_component.items():
            for path, one in layers.items():
                shape = (one.expand.shape[0], *one.shrink.shape[1:])
                assert shape == shapes[f"{name}.{path}"]
                assert one.rank == one.shrink.shape[0] > 0
        # two keys a layer, and an alpha
        assert factors.num_layers in {num_layers, num_layers - 1}

    for tensors in (plain(sd), kohya(sd)):
        num_layers = sum("up.weight" in key or "lora_B" in key for key in tensors)
        for _, broken in changed(tensors, numbers, num_keys):
            attempt(sd.read, broken)
    tensors = plain(sd)
    num_layers = len(tensors) // 2
    for header in headers():
        attempt(sd.read, tensors, header)
    sd.read(tensors)
    for content in damaged(sd.path.read_bytes(), numbers, num_damaged):
        sd.path.write_bytes(content)
        attempt(sd.read_as_it_is)
    assert sum(outcomes.values()) >= least
    assert outcomes["refused"] > 5 * outcomes["read"] > 0
    # it reads whole ones after all that
    assert sd.read(tensors).num_layers == len(tensors) // 2
