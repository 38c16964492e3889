"""Training is resumable to the bit, can be paused and stopped, and can be told to end."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ray_cluster.errors import ConfigError
from ray_cluster.quality.render import Placed, place
from ray_cluster.quality.scenes import omit_all_details, sample_single
from recipes.batches import draw_captioned
from recipes.discriminators.classifier_training import classifier_trainer
from recipes.export import SHAPES_SD
from recipes.networks.denoiser import loss_weights
from recipes.recipe import Recipe
from recipes.runs import open_run
from recipes.stages import MODEL_STAGES, find_stage
from recipes.trainer import RunFolder, Trainer, run_stage
from tests.recipes.tiny import SD_STAGES, TINY_STEPS, tiny_recipe, tiny_run

# of the stages of all kinds; what each of the others trains, its own tests train too
QUICK = {"codec", "denoiser", "text", "transformer", "transformer-refinement"}
ALL_STAGES = [
    pytest.param(model, stage.name, marks=[] if stage.name in QUICK else [pytest.mark.slow])
    for model, stages in MODEL_STAGES.items()
    for stage in stages
]


def states_equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return isinstance(second, dict) and all(states_equal(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return isinstance(second, list) and all(map(states_equal, first, second))
    return first == second


@pytest.mark.parametrize(("model", "stage"), ALL_STAGES)
def test_a_killed_and_resumed_stage_equals_an_unbroken_one(
    model: str, stage: str, tmp_path: Path, tiny_base: Path
) -> None:
    needed = {
        "refinement": ["text", "denoiser"],
        "denoiser": ["text"],
        "light-refinement": ["light"],
        "transformer-refinement": ["transformer"],
    }.get(stage, [])
    base = None if model == "shapes-sd" else tiny_base
    whole, broken = (
        tiny_run(tmp_path / name, stages=needed, base=base, model=model)
        for name in ("whole", "broken")
    )
    unbroken = find_stage(model, stage).build(whole)
    while not unbroken.is_finished:
        unbroken.step()

    killed = find_stage(model, stage).build(broken)
    for _ in range(4):
        killed.step()
    broken.folder.save(killed)
    resumed = find_stage(model, stage).build(broken)
    assert run_stage(resumed, broken.folder, threading.Event())
    assert resumed.index == TINY_STEPS.steps
    assert states_equal(resumed.state(), unbroken.state())


def test_all_stages_train_one_after_the_other_and_leave_a_log(tmp_path: Path) -> None:
    longer = replace(TINY_STEPS, steps=25)
    recipe = tiny_recipe()
    recipe = replace(recipe, text=replace(recipe.text, optimisation=longer))
    tiny_run(tmp_path, recipe, SD_STAGES)
    lines = (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [25]
    assert {path.name for path in tmp_path.glob("*.pt")} == {f"{name}.pt" for name in SD_STAGES}


def test_refinement_starts_from_the_averaged_denoiser_and_needs_it_finished(
    tmp_path: Path,
) -> None:
    run = tiny_run(tmp_path, stages=["text"])
    first = find_stage("shapes-sd", "denoiser").build(run)
    first.step()
    run.folder.save(first)
    with pytest.raises(FileNotFoundError, match="train the stage 'denoiser' first"):
        find_stage("shapes-sd", "refinement").build(run)
    tiny_run(tmp_path, stages=["denoiser"])
    run.folder.restore(first)
    first.use_average()
    second = find_stage("shapes-sd", "refinement").build(run)
    assert second.index == 0
    assert states_equal(second.model.state_dict(), first.model.state_dict())


def test_a_stage_without_what_it_builds_on_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train the stage 'text' first"):
        find_stage("shapes-sd", "denoiser").build(open_run(tmp_path, recipe=tiny_recipe()))


def test_a_later_stage_begins_with_the_weights_of_a_base(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", base=SHAPES_SD)
    trainer = find_stage("shapes-sd", "refinement").build(run)
    weights = load_file(SHAPES_SD / "unet" / "diffusion_pytorch_model.safetensors")
    mine = trainer.model.state_dict()
    assert mine.keys() == weights.keys()
    assert all(torch.equal(mine[name], value.float()) for name, value in weights.items())


def test_a_run_keeps_its_seed_and_its_base(tmp_path: Path) -> None:
    assert open_run(tmp_path, seed=5, base=SHAPES_SD).recipe.seed == 5
    again = open_run(tmp_path)
    assert (again.recipe.seed, again.base) == (5, SHAPES_SD)
    with pytest.raises(ConfigError, match="seed 5, not 6; leave --seed out"):
        open_run(tmp_path, seed=6)
    with pytest.raises(ConfigError, match="has base"):
        open_run(tmp_path, base=SHAPES_SD.with_name("shapes-sd-light"))


def placed_scenes(count: int) -> Placed:
    rng = random.Random(3)
    return place([sample_single(rng) for _ in range(count)], width=16, height=16)


def test_objects_weigh_more_only_where_their_place_is_known() -> None:
    phase = Recipe().denoiser.second
    weights = loss_weights(
        placed_scenes(2), torch.tensor([True, False]), phase, width=16, height=16
    )
    assert weights[0].unique().tolist() == [1.0, phase.object_weight]
    assert weights[1].unique().tolist() == [1.0]


def test_a_caption_of_one_object_goes_with_a_picture_of_one() -> None:
    rng, mix = random.Random(4), Recipe().denoiser.second.captions
    drawn = [draw_captioned(rng, mix) for _ in range(500)]
    for one in drawn:
        is_single = " above " not in one.caption and " left of " not in one.caption
        assert is_single == (len(one.scene.objects) == 1)
    # a quarter leave out all details, and more do so by chance
    bare = [one for one in drawn if omit_all_details(one.stated) == one.stated]
    assert 0.2 < len(bare) / len(drawn) < 0.4


def test_a_stopped_run_keeps_its_step(tmp_path: Path) -> None:
    stop = threading.Event()
    trainer = classifier_trainer(open_run(tmp_path, recipe=tiny_recipe()))
    trainer.step()
    stop.set()
    folder = RunFolder(tmp_path)
    folder.save(trainer)
    assert not run_stage(trainer, folder, stop)
    again = classifier_trainer(open_run(tmp_path, recipe=tiny_recipe()))
    assert folder.restore(again)
    assert again.index == 1


def test_finish_ends_a_long_run_after_one_decay(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    long = replace(recipe.classifier, optimisation=replace(TINY_STEPS, steps=10_000))
    trainer = classifier_trainer(open_run(tmp_path, recipe=replace(recipe, classifier=long)))
    (tmp_path / "FINISH").touch()
    assert run_stage(trainer, RunFolder(tmp_path), threading.Event())
    assert trainer.index == TINY_STEPS.decay_steps


def test_a_deadline_begins_the_decay(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    long = replace(recipe.classifier, optimisation=replace(TINY_STEPS, steps=10_000))
    trainer = classifier_trainer(open_run(tmp_path, recipe=replace(recipe, classifier=long)))
    clock = iter(range(100))
    assert run_stage(
        trainer, RunFolder(tmp_path), threading.Event(), deadline=4, now=lambda: next(clock)
    )
    assert trainer.index < 10


def test_a_paused_run_waits_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "PAUSE").touch()
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    trainer = classifier_trainer(open_run(tmp_path, recipe=tiny_recipe()))
    assert not run_stage(trainer, RunFolder(tmp_path), stop)
    assert trainer.index <= 1


def test_the_rate_warms_up_stays_and_decays() -> None:
    model = torch.nn.Linear(1, 1)
    options = replace(TINY_STEPS, steps=100, rate=1.0, warmup_steps=10, decay_steps=20)
    trainer = Trainer("line", model, lambda _: model(torch.ones(1, 1)).sum(), options)
    rates = []
    while not trainer.is_finished:
        rates.append(trainer.rate)
        trainer.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[50] == 1.0
    assert rates[-1] == pytest.approx(0.05)
    assert rates[80:] == sorted(rates[80:], reverse=True)
