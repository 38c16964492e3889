"""Profiles come back as they were written, bad ones are refused, ours are what they say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.errors import ConfigError
from ray_cluster.models.latency_profiles import builtin_profiles, load_profile, save_profile
from ray_cluster.policies.costs.latency import LatencyProfile, LatencyRow, OperationKey, SizeCount

seconds = st.floats(1e-6, 1e4).map(lambda value: float(f"{value:.6g}"))
sides = st.integers(8, 2048)
batches = st.integers(1, 64)
size_counts = st.builds(SizeCount, sides, sides, batches)
mixed_keys = st.builds(
    lambda sizes, guided: OperationKey("step", uses_guidance=guided).of_sizes(sizes),
    st.lists(size_counts, min_size=2, max_size=4, unique_by=lambda one: one[:2]),
    st.booleans(),
)
keys = st.one_of(
    mixed_keys,
    st.tuples(
        st.sampled_from(["step", "decode"]),
        sides,
        sides,
        batches,
        st.sampled_from([1, 2, 8]),
        st.booleans(),
    ).map(lambda values: OperationKey(*values)),
    st.builds(
        lambda operation, batch: OperationKey(operation, batch=batch),
        st.sampled_from(["encode", "load"]),
        batches,
    ),
    st.builds(
        lambda width, height, steps: OperationKey("image", width, height, num_steps=steps),
        sides,
        sides,
        st.integers(1, 9),
    ),
)
rows = st.builds(
    LatencyRow,
    keys,
    seconds,
    st.sampled_from(["measured", "published", "modelled"]),
    st.sampled_from(["some machine, 2026", "a paper's table 3", "a: formula # with signs"]),
    cv=st.sampled_from([0.0, 0.007, 1.5]),
)


@given(st.lists(rows, min_size=1, max_size=8, unique_by=lambda row: row.key))
def test_a_written_profile_comes_back(
    tmp_path_factory: pytest.TempPathFactory, table: list[LatencyRow]
) -> None:
    path = tmp_path_factory.mktemp("profile") / "mine.yaml"
    profile = LatencyProfile("mine", "some-model", "H100", tuple(table))
    save_profile(path, profile)
    assert load_profile(path) == profile


def test_the_order_of_sizes_in_a_step_does_not_matter(tmp_path: Path) -> None:
    beside = "[{width: 96, height: 96}, {width: 32, height: 64, batch: 3}]"
    path = tmp_path / "mixed.yaml"
    path.write_text(HEAD + SOURCE + f"rows: [{{{STEP}, batch: 2, beside: {beside}}}]")
    (row,) = load_profile(path).rows
    sizes = (SizeCount(32, 64, 3), SizeCount(64, 64, 2), SizeCount(96, 96))
    assert row.key.sizes == sizes
    assert row.key == OperationKey("step").of_sizes(reversed(sizes))
    assert row.key.num_images == 6


HEAD = "format: ray-cluster latency profile 1\nmodel: m\ndevice: d\nkind: measured\n"
SOURCE = "source: a machine, today\n"
STEP = "operation: step, width: 64, height: 64, seconds: 1"
LARGE = "operation: step, width: 96, height: 96, seconds: 1"
SIZE, OTHER = "{width: 64, height: 64}", "{width: 96, height: 96}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("must be a mapping",)),
        (HEAD + SOURCE + "rows: []", ("rows", "at least 1")),
        (HEAD + f"rows: [{{{STEP}}}]", ("source", "missing")),
        (HEAD + SOURCE + f"rows: [{{{STEP}, second: 1}}]", ("did you mean 'seconds'",)),
        (HEAD + SOURCE + f"rows: [{{{STEP}}}, {{{STEP}}}]", ("several for", "leave one")),
        (HEAD + SOURCE + "rows: [{operation: step, seconds: 1}]", ("needs width and height",)),
        (HEAD + SOURCE + "rows: [{operation: load, width: 8, seconds: 1}]", ("leave them out",)),
        (HEAD + SOURCE + f"rows: [{{{STEP}, steps: 3}}]", ("only image does",)),
        (
            HEAD + SOURCE + "rows: [{operation: encode, seconds: 1, beside: [{width: 8}]}]",
            ("rows.0.beside.0.height", "missing"),
        ),
        (
            HEAD + SOURCE + f"rows: [{{operation: encode, seconds: 1, beside: [{SIZE}]}}]",
            ("nothing beside it", "only step does"),
        ),
        (HEAD + SOURCE + f"rows: [{{{STEP}, beside: [{SIZE}]}}]", ("each once", "join equal")),
        (
            HEAD + SOURCE + f"rows: [{{{LARGE}, beside: [{SIZE}]}}, {{{STEP}, beside: [{OTHER}]}}]",
            ("several for", "leave one"),
        ),
        (HEAD + SOURCE + "rows: [{operation: load, seconds: -1}]", ("rows.0.seconds", "given -1")),
        (HEAD + SOURCE + "rows: [{operation: load, seconds: .nan}]", ("finite",)),
        (HEAD + SOURCE + "rows: [{operation: nap, seconds: 1}]", ("rows.0.operation", "'nap'")),
        (
            HEAD + SOURCE + "rows: [{operation: image, width: 8, height: 8, seconds: 1}]",
            ("an image needs its steps",),
        ),
        ("rows: [", ("cannot read",)),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert "bad.yaml" in message
    assert all(part in message for part in parts), message


def test_names_that_are_none_are_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile 'flux'.*flux-h100-a"):
        load_profile("flux")
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"ends in \.yaml"):
        save_profile(tmp_path / "a.json", load_profile("flux-h100-a"))


@pytest.mark.parametrize("name", builtin_profiles())
def test_every_profile_of_the_package_loads_and_says_where_it_is_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert all(len(row.source) > 40 for row in profile.rows)
    # nothing that ships was measured by us on such devices
    assert set(profile.kinds) <= {"published", "modelled"}


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("flux-h100-a", OperationKey("image", 2048, 2048, sp_degree=8, num_steps=50), 4.90),
        ("flux-h100-b", OperationKey("image", 512, 512, sp_degree=2, num_steps=50), 1.50),
        ("sd-turbo-a100", OperationKey("image", 512, 512, batch=16, num_steps=1), 0.770),
        (
            "sd15-a100",
            OperationKey("image", 512, 512, batch=32, uses_guidance=True, num_steps=50),
            25.35,
        ),
    ],
)
def test_figures_are_the_sources(name: str, key: OperationKey, expected: float) -> None:
    row = load_profile(name).find(key)
    assert row is not None
    assert row.seconds == expected


@pytest.mark.parametrize(("name", "ratio"), [("sdxl-h100", 1.3), ("sd3-h100", 2.4)])
def test_modelled_steps_keep_the_published_ratio_of_sizes(name: str, ratio: float) -> None:
    profile = load_profile(name)
    large, small = (
        profile.find(OperationKey("step", side, side, uses_guidance=True)) for side in (1024, 512)
    )
    assert large is not None
    assert small is not None
    assert large.seconds / small.seconds == pytest.approx(ratio, rel=0.01)
    assert len(profile.of("step")) == 15
    assert profile.of("decode") == ()
