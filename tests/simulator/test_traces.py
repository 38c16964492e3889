"""Traces come back as they were written, and bad ones are refused with the place."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.errors import ConfigError
from ray_cluster.simulator.traces import read_instants, read_trace, write_trace
from ray_cluster.simulator.workload import Arrival

names = st.text("abcXYZ-_0 ,\"'ä", min_size=1, max_size=6).filter(lambda s: s.strip() == s)
arrivals = st.builds(
    Arrival,
    arrival_s=st.floats(0, 1e6),
    model=names,
    width_px=st.integers(8, 4096),
    height_px=st.integers(8, 4096),
    num_steps=st.integers(1, 100),
    uses_guidance=st.booleans(),
    slo_s=st.one_of(st.just(math.inf), st.floats(0.01, 1e4)),
    slo_class=names,
    priority=st.integers(-100, 100),
    controlnets=st.lists(names, max_size=3).map(tuple),
    loras=st.lists(names, max_size=2).map(tuple),
    mask_ratio=st.one_of(st.none(), st.floats(0, 1)),
    template=st.one_of(st.none(), names),
    reference_px=st.integers(0, 1 << 24),
    fewest_steps=st.one_of(st.none(), st.just(1)),
)


@given(st.lists(arrivals, min_size=1, max_size=8), st.sampled_from(["csv", "jsonl"]))
def test_a_written_trace_comes_back(
    tmp_path_factory: pytest.TempPathFactory, workload: list[Arrival], kind: str
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"trace.{kind}"
    write_trace(path, workload)
    assert read_trace(path) == sorted(workload, key=lambda one: one.arrival_s)


def test_a_plain_table_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,model,width,height,steps,guidance,loras,slo_s\n"
        "2.5,sdxl,1024,768,30,no,style|detail,\n"
        "0,sdxl,512,512,20,,,4\n"
    )
    first, second = read_trace(path)
    assert first == Arrival(0.0, "sdxl", 512, 512, 20, slo_s=4.0)
    assert (second.uses_guidance, second.loras) == (False, ("style", "detail"))
    assert second.slo_s == math.inf
    assert read_instants(path) == [0.0, 2.5]


HEADER = "arrival_s,model,width,height,steps"


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.csv", f"{HEADER}\n1,m,64,64,0\n", ("line 2", "steps", "at least 1", "given '0'")),
        ("a.csv", f"{HEADER}\n1,m,64,64,5\n-1,m,64,64,5\n", ("line 3", "arrival_s")),
        ("a.csv", f"{HEADER}\nnan,m,64,64,5\n", ("line 2", "arrival_s", "finite")),
        ("a.csv", f"{HEADER},step\n1,m,64,64,5,5\n", ("step", "did you mean 'steps'")),
        ("a.csv", f"{HEADER}\n1,m,64,64\n", ("steps", "missing")),
        ("a.csv", f"{HEADER}\n1,m,64,64,5,6\n", ("line 2", "more cells than the header")),
        ("a.csv", f"{HEADER}\n1.7e9,m,64,64,5\n", ("line 2", "arrival_s", "at most")),
        ("a.csv", f"{HEADER},steps\n1,m,64,64,5,6\n", ("the header has a column twice",)),
        ("a.jsonl", '{"steps": 5, "steps": 6}\n', ("line 1", "a key twice")),
        ("a.jsonl", "[" * 200_000, ("line 1", "nested too deeply")),
        ("a.csv", f"{HEADER}\n", ("no requests",)),
        ("a.csv", "", ("no requests",)),
        (
            "a.csv",
            f"{HEADER},fewest_steps\n1,m,64,64,5,6\n",
            ("line 2", "fewest_steps must be at most steps, 5; given 6"),
        ),
        ("a.jsonl", "{}\n", ("line 1", "arrival_s", "missing")),
        ("a.jsonl", "\n[1]\n", ("line 2", "not an object")),
        ("a.jsonl", "{\n", ("line 1", "not JSON")),
        (
            "a.jsonl",
            '{"arrival_s": 0, "model": "m", "width": 8, "height": 8, "steps": 1, "loras": ["a|b"]}',
            ("line 1", "loras", "pattern"),
        ),
        ("a.txt", "x", (".csv or .jsonl", "a.txt")),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, name: str, text: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("missing.csv", "binary.csv"):
        with pytest.raises(ConfigError, match="cannot read the trace"):
            read_trace(tmp_path / name)
