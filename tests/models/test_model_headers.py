"""What model files must not do to those who read their headers: lie, or hold them up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from ray_cluster.errors import ConfigError
from ray_cluster.models.checkpoints.gguf_files import gguf_tensors
from ray_cluster.models.checkpoints.layouts import read_layout
from ray_cluster.models.json_files import head_of, read_object
from ray_cluster.models.weight_files import header_shapes

NUM_BYTES = 64


def tensor(dtype: str, shape: list[Any], *offsets: float) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets or (0, NUM_BYTES)}


def safe(path: Path, header: bytes | dict[str, Any], num_bytes: int = NUM_BYTES) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


WHOLE = json.dumps(tensor("F32", [16])).encode()
LIES: dict[str, bytes | dict[str, Any]] = {
    "overlap": {"a": tensor("F32", [16]), "b": tensor("F32", [16])},
    "gap": {"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 60, 64)},
    "late start": {"a": tensor("F32", [15], 4, 64)},
    "nothing, in the middle": {"a": tensor("F32", [16]), "b": tensor("F32", [0], 32, 32)},
    "unknown dtype": {"a": tensor("F99", [16])},
    "no dtype": {"a": {"shape": [16], "data_offsets": [0, 64]}},
    "large shape": {"a": tensor("F32", [10**6, 10**6])},
    "half a byte": {"a": tensor("F4", [127])},
    "infinite side": {"a": tensor("F32", [float("inf")])},
    "float side": {"a": tensor("F32", [16.0])},
    "bools": {"a": tensor("U8", [True], False, 64)},
    "two minuses": {"a": tensor("F32", [-4, -4])},
    "text as shape": {"a": tensor("F32", []) | {"shape": "16"}},
    "field twice": b'{"a":{"dtype":"U8",' + WHOLE[1:] + b"}",
    "number as metadata": {"__metadata__": {"a": 5}, "a": tensor("F32", [16])},
    "list": b"[]",
}


@pytest.mark.parametrize("kind", LIES)
def test_headers_that_safetensors_refuses_are_refused(tmp_path: Path, kind: str) -> None:
    path = safe(tmp_path / "x.safetensors", LIES[kind])
    with pytest.raises(SafetensorError):
        safe_open(path, "np")
    with pytest.raises(ConfigError, match=r"x\.safetensors is no safetensors file"):
        header_shapes(path)


def test_headers_that_safetensors_takes_are_taken(tmp_path: Path) -> None:
    bits = {"F4": 4, "F6_E2M3": 6, "F8_E4M3": 8, "F8_E8M0": 8, "BOOL": 8, "BF16": 16, "C64": 64}
    entries, end = {"__metadata__": None, "none": tensor("F32", [0, 7], 0, 0)}, 0
    for dtype, width in bits.items():
        entries[dtype] = tensor(dtype, [2, 8], end, end + 2 * width)
        end += 2 * width
    entries["last"] = tensor("I64", [3, 0], end, end)
    path = safe(tmp_path / "x.safetensors", dict(reversed(entries.items())), end)
    with safe_open(path, "np") as stored:
        assert header_shapes(path).keys() == set(stored.keys())
    assert header_shapes(path)["F4"] == (2, 8)


def test_names_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    twice = b'{"a":' + WHOLE + b',"a":' + WHOLE + b"}"
    with pytest.raises(ConfigError, match="twice"):
        header_shapes(safe(tmp_path / "x.safetensors", twice))


def test_headers_too_large_to_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(pack("<Q", 2**32))
        file.truncate(8 + 2**32)
    with pytest.raises(ConfigError, match="more than 100000000 bytes"):
        header_shapes(path)
    with pytest.raises(ConfigError, match="brackets"):
        header_shapes(safe(path, b"[" * 1_000_001))
    many = b",".join(b'"%d":{}' % name for name in range(100_001))
    with pytest.raises(ConfigError, match="100001 tensors"):
        header_shapes(safe(path, b"{" + many + b"}"))
    # whose product would take minutes
    with pytest.raises(ConfigError, match="its header"):
        header_shapes(safe(path, {"a": tensor("U8", [2**62] * 200_000)}))


def test_unets_of_very_many_levels_are_refused(tmp_path: Path) -> None:
    names = ["first_stage_model.x", "cond_stage_model.transformer.x"]
    names += [f"model.diffusion_model.input_blocks.{n}.0.op.weight" for n in range(12_000)]
    header = {name: tensor("U8", [1], at, at + 1) for at, name in enumerate(names)}
    with pytest.raises(ConfigError, match="levels"):
        read_layout(safe(tmp_path / "x.safetensors", header, len(names)))


@pytest.mark.parametrize("read", [header_shapes, gguf_tensors, head_of, read_object])
@pytest.mark.timeout(5)
def test_pipes_and_devices_are_no_files(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("link", "zeros", "."):
        with pytest.raises(ConfigError, match="no regular file"):
            read(tmp_path / name)


def gguf(values: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 1)) -> bytes:
    return b"GGUF" + pack("<IQQ", 3, *counts) + values + tensors


def array(kind: int, count: int) -> bytes:
    return pack("<Q1sIIQ", 1, b"a", 9, kind, count)


ENDLESS = {
    "array beyond the end": (gguf(array(0, 500_000) + bytes(NUM_BYTES)), "its header ends"),
    "array of 2**62": (gguf(array(0, 2**62) + bytes(NUM_BYTES)), "1000000 elements"),
    "texts without an end": (gguf(array(8, 500_000)), "unpack_from"),
    "arrays in an array": (gguf(array(9, 1) * 100), "of type 9"),
    "many elements": (gguf(array(0, 2_000_000) + bytes(2_000_000)), "1000000 elements"),
    "many small arrays": (
        gguf((array(0, 600_000) + bytes(600_000)) * 2, counts=(0, 2)),
        "1000000 elements",
    ),
    "long name": (gguf(pack("<Q", 2**62)), "its header ends"),
    "many values": (gguf(counts=(0, 2**62)), "tensors or values"),
    "many tensors": (gguf(counts=(2**64 - 1, 0)), "tensors or values"),
    "tensors that are not there": (gguf(counts=(1000, 0)), "unpack_from"),
    "many sides": (gguf(tensors=pack("<Q1sI", 1, b"a", 2**31), counts=(1, 0)), "sides"),
    "other byte order": (b"GGUF" + pack(">IQQ", 3, 0, 0), "byte order"),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.timeout(5)
def test_gguf_headers_that_have_no_end_are_refused(tmp_path: Path, kind: str) -> None:
    content, said = ENDLESS[kind]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.gguf cannot be read .*{said}"):
        gguf_tensors(path)
