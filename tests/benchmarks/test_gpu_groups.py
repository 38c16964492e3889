"""The GPU suite's groups on CPUs: without devices none, and with two ranks all that there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu.exchanges import Exchange, exchanges_of
from benchmarks.gpu.families import published
from benchmarks.gpu.groups import measure_degrees, run_groups
from benchmarks.gpu.profile import group_profiles, save_profiles
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Settings, tiny_settings, usable_ranks
from benchmarks.tables import has_problems
from ray_cluster.engine.groups.degree_costs import Way
from ray_cluster.engine.groups.measuring import GroupTimer
from ray_cluster.engine.groups.ranks import StepEnd
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.costs.latency import OperationKey
from ray_cluster.simulator.groups.experiment import run_unit, units_of
from tests.simulator.group_rules import sp_experiment

SETTINGS = tiny_settings("none", "cpu")
WAYS = (Way(1), Way(2), Way(4), Way(2, "apart"))
SIDES = (256, 512, 1024, 2048)
COSTS = [{"degree": 1, "cost": {"decode_per_megapixel_s": 0.05}}]


class VirtualTimer(GroupTimer):
    """Ranks twice as many of which are 1.6 times as fast; rows apart are a tenth faster.

    Args:
        spoilt: a way whose predictions are those of no latents.
    """

    def __init__(self, spoilt: Way | None = None) -> None:
        self._spoilt = spoilt

    def ends(
        self, size: tuple[int, int], ways: Sequence[tuple[Way, range]], *, guided: bool = False
    ) -> list[StepEnd]:
        [(way, ranks)] = ways
        assert guided
        assert len(ranks) == way.degree
        speed = 1.6 ** (way.degree.bit_length() - 1) / (0.9 if way.rows == "apart" else 1.0)
        found = torch.randn(16, 4)
        return [StepEnd(1, size[0] ** 2 / 1e6 / speed, found.roll(int(way == self._spoilt)))]


def record_of(folder: Path, timer: GroupTimer) -> Record:
    record = Record(folder / "part.json", 1000.0)
    settings = replace(SETTINGS, num_ranks=4, group_px=SIDES)
    with record.section("sd3, group") as section:
        section.found["group_cost"] = {"costs": COSTS}
    with record.section("sd3, steps by degree") as section:
        measure_degrees(settings, settings.family("sd3"), WAYS, timer, section)
    return record


def test_without_devices_groups_are_skipped_and_the_suite_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    arguments = ["--device", "cpu", "--tiny", "--only", "groups", "--out", str(tmp_path)]
    assert suite.main(arguments) == 0
    torch.set_num_threads(threads)
    assert "groups: skipped: 0 CUDA devices" in capsys.readouterr().out
    [path] = tmp_path.glob("*.json")
    [section] = json.loads(path.read_text())["parts"]["groups"].values()
    assert section["skipped"].startswith("0 CUDA devices")
    assert "tables" not in section


def test_each_rank_has_a_device_and_their_number_is_a_power_of_two() -> None:
    assert [usable_ranks(count) for count in (0, 1, 2, 3, 7, 8, 12)] == [0, 1, 2, 2, 4, 8, 8]


def test_exchanges_have_the_sizes_of_a_step() -> None:
    settings = Settings(num_ranks=8, group_px=(1024,))
    sd3, flux = (settings.family(name) for name in settings.grouped)
    odd = replace(flux, name="odd", config={**flux.config, "num_attention_heads": 12})
    found = exchanges_of(settings, (sd3, flux, odd))
    assert {one.family: one.degree for one in found} == {"sd3": 8, "flux": 8, "odd": 4}
    # 4,096 tokens and the prompt's, on 4 ranks, in 16 bits
    assert Exchange("flux", 1024, 4, 1, 57, 1152 * 3072 * 2) in found
    assert Exchange("sd3", 1024, 4, 2, 24, 2 * 1108 * 1536 * 2) in found
    assert {one.name for one in published()} > set(settings.grouped)


def test_the_simulator_reads_the_menus_of_measured_steps(tmp_path: Path) -> None:
    record = record_of(tmp_path, VirtualTimer())
    assert not has_problems(record.sections)
    result = {"device": {"name": "a device"}, "source": "a machine of a test"}
    [path] = save_profiles({**result, "parts": {"groups": record.sections}}, tmp_path, "gpu")
    assert path.name == "gpu-sd3-group.yaml"
    profile = load_profile(path)
    key = OperationKey("step", 1024, 1024, sp_degree=2, uses_guidance=True)
    row = profile.find(key)
    assert row is not None
    assert row.kind == "measured"
    # rows apart are faster
    assert row.seconds == pytest.approx(0.9 * 1.024**2 / 1.6, rel=1e-3)
    experiment = sp_experiment(profile=str(path), num_gpus=4, policies=["rounds/large", "widest"])
    menu = experiment.menus()["2048"]
    assert menu.degrees == (1, 2, 4)
    assert menu.step_s[0] == pytest.approx(2.048**2, rel=1e-3)
    assert menu.tail_s == pytest.approx(0.05 * 2.048**2, rel=1e-3)
    rows = run_unit(units_of(experiment, tmp_path)[0])
    assert {one.policy for one in rows} == {"rounds/large", "widest"}


def test_a_degree_that_predicts_something_else_fails_and_gets_no_profile(tmp_path: Path) -> None:
    record = record_of(tmp_path, VirtualTimer(Way(4)))
    problems = record.sections["sd3, steps by degree"]["problems"]
    assert len(problems) == len(SIDES)
    assert "degree=4" in problems[0]
    assert not list(group_profiles(record.sections, device="d", source="s"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ranks")
def test_two_ranks_exchange_step_and_change(tmp_path: Path) -> None:
    record = Record(tmp_path / "part.json", 1000.0)
    run_groups(replace(SETTINGS, num_ranks=2), record)
    found = record.sections
    assert {one["status"] for one in found.values()} == {"ok"}, found
    cells = found["exchanges"]["tables"]["exchanges"]
    assert [(one["family"], one["degree"]) for one in cells] == [("sd3", 2)] * 2 + [("flux", 2)] * 2
    assert all(one["step_ms"] > 0 and one["there_ms"]["n"] == 3 for one in cells)
    for name, ways in (("sd3", 3), ("flux", 2)):
        assert len(found[f"{name}, group"]["tables"]["menu, rows together"]) == 2
        assert found[f"{name}, group"]["group_cost"]["num_ranks"] == 2
        steps = found[f"{name}, steps by degree"]["tables"]["steps by degree"]
        assert len(steps) == ways * len(SETTINGS.group_px)
        changes = found[f"{name}, changes of ranks"]["tables"]["changes"]
        names = ["same", "grow", "shrink", "move"]
        assert [one["change"] for one in changes] == names * len(SETTINGS.group_px)
    profiles = list(group_profiles(found, device="cpu", source="a machine"))
    assert [one.name for one in profiles] == ["sd3-group", "flux-group"]
    assert {row.key.sp_degree for row in profiles[0].of("step")} == {1, 2}
