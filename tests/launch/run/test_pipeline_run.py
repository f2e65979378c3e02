"""A pipeline on one machine: stages in order, what is done is skipped, what failed is said, mistakes come first."""

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.start import Launch
from shardvit.launch.run import pipeline_run
from shardvit.launch.run.lock import locked
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED
from tests.launch.machine import Machine
from tests.saving import one_rank, save

STAGES = ("pretrain", "swap_head", "finetune")


def test_all_stages_in_order_then_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]):
    run = machine.open()
    assert not run.folder.path.exists()  # opening writes nothing
    assert run.execute() == 0
    assert machine.started == list(STAGES)
    assert all(launch.processes == 2 for launch in machine.launches)  # the recipe's
    assert "finetune: done, held-out top-1 0.7500 after 64 images" in capsys.readouterr().out
    assert machine.open().execute() == 0
    assert machine.started == list(STAGES)
    assert "pretrain: done already" in capsys.readouterr().out


def test_one_stage(machine: Machine):
    assert machine.open().execute(only="pretrain") == 0
    assert machine.started == ["pretrain"]
    assert machine.open().execute() == 0
    assert machine.started == ["pretrain", "swap_head", "finetune"]


@pytest.mark.parametrize("mode", ["train", "dry-run"])
def test_a_stage_whose_earlier_ones_are_not_done_is_refused(machine: Machine, mode: Literal["train", "dry-run"]):
    with pytest.raises(UserError, match=r"--stage finetune: in .*digits, pretrain and swap_head must be done first"):
        machine.open().execute(only="finetune", mode=mode)
    assert machine.started == [] and not machine.folder.path.exists()
    machine.open().execute()
    machine.open().execute(only="finetune", mode=mode)
    again = machine.open(restart="pretrain")
    with pytest.raises(UserError, match="pretrain and swap_head must be done first"):  # they are moved aside
        again.execute(only="finetune", mode=mode)


def test_a_stage_that_the_recipe_lacks_is_refused(machine: Machine):
    run = machine.open(recipe="digits_scratch", shards_of=("finetune",))
    with pytest.raises(UserError, match="--stage pretrain: the recipe has only the stages finetune"):
        run.execute(only="pretrain")
    with pytest.raises(UserError, match="--restart pretrain: the recipe has only the stages finetune"):
        PipelineRun.open(load_recipe("digits_scratch"), runs_root=machine.root / "runs", restart="pretrain")
    assert machine.started == [] and not run.folder.path.exists()


@pytest.mark.parametrize(
    ("launcher", "saved", "ours", "said"),
    [
        (0, 0, 1, "resumes from its beginning"),  # deepspeed's 0 when a signal killed it: not done is not done
        (1, 400, 1, "resumes from step 400"),
        (-9, 400, 1, "resumes from step 400"),
        (EXIT_STOPPED, 1400, EXIT_STOPPED, "resumes from step 1,400"),
        (2, 0, 2, None),  # the rank has said why
    ],
)
def test_what_is_not_done_ends_the_run(
    machine: Machine, capsys: pytest.CaptureFixture[str], launcher: int, saved: int, ours: int, said: str | None
):
    def outcome(launch: Launch) -> int:
        machine.folder.update(launch.stage, state="running", last_saved_step=saved)
        return launcher

    machine.outcome = outcome
    assert machine.open().execute() == ours
    assert machine.started == ["pretrain"]
    error = capsys.readouterr().err
    assert (said in error and error.startswith("shardvit: pretrain is not finished")) if said else error == ""
    machine.outcome = None
    assert machine.open().execute() == 0
    assert machine.started == ["pretrain", *STAGES]


def test_a_recipe_that_is_edited_meanwhile_is_for_the_next_run(machine: Machine, tmp_path: Path):
    def outcome(launch: Launch) -> int:
        resolved.append(load_recipe(str(launch.recipe_file)))
        file.write_text("extends: digits\nname: the-next-one\nseed: 7\n")
        machine.folder.update(launch.stage, state="done")
        return 0

    resolved: list[Recipe] = []
    file = tmp_path / "mine.yaml"
    file.write_text("extends: digits\n")
    machine.outcome = outcome
    run = machine.open(recipe=str(file))
    assert run.execute() == 0
    assert tuple(machine.started) == STAGES and resolved == [run.recipe] * 3
    assert not (machine.root / "runs" / "the-next-one").exists()


def test_done_is_believed_whatever_the_launcher_says(machine: Machine):
    def outcome(launch: Launch) -> int:
        machine.folder.update(launch.stage, state="done")
        return 1

    machine.outcome = outcome
    assert machine.open().execute() == 0
    assert machine.together == [STAGES, STAGES[1:], STAGES[2:]]


def test_the_processes_are_started_once_for_all_stages_that_are_not_done(machine: Machine):
    assert machine.open().execute(only="pretrain") == 0
    assert machine.open().execute() == 0
    assert machine.together == [("pretrain",), ("swap_head", "finetune")]
    assert [launch.ranks for launch in machine.launches] == [2, 1, 2]  # each as if it were alone
    machine.together.clear()
    assert machine.open(restart="pretrain").execute() == 0
    assert machine.together == [STAGES]


def test_of_a_later_stage_that_fails_it_is_said_and_only_that_is_started_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
):
    def outcome(launch: Launch) -> int:
        failed = launch.stage == "finetune" and len(machine.together) == 1
        machine.folder.update(launch.stage, state="running" if failed else "done", last_saved_step=30)
        return 1 if failed else 0

    machine.outcome = outcome
    assert machine.open().execute() == 1
    assert capsys.readouterr().err.startswith("shardvit: finetune is not finished (exit code 1): ")
    assert machine.open().execute() == 0
    assert machine.together == [STAGES, ("finetune",)]


def test_a_dry_run_shows_the_resolved_recipe_and_writes_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]):
    assert machine.open("seed=5").execute(mode="dry-run") == 0
    output = capsys.readouterr().out
    assert "\nseed: 5\n" in output and "collective_timeout_seconds" not in output
    assert machine.open("seed=5").execute(mode="dry-run", keys="all") == 0
    assert "collective_timeout_seconds" in capsys.readouterr().out
    assert machine.started == [] and not (machine.root / "runs").exists()


def test_restarting_runs_that_stage_and_those_after_it(machine: Machine, capsys: pytest.CaptureFixture[str]):
    machine.open().execute()
    machine.started.clear()
    changed = "stages.finetune.optimizer.lr=0.5"
    with pytest.raises(UserError, match=r"finetune\.optimizer\.lr: [0-9.]+ -> 0\.5"):
        machine.open(changed)
    assert machine.open(changed, restart="finetune").execute() == 0
    assert machine.started == ["finetune"]
    assert "aside" in capsys.readouterr().out
    assert machine.open(changed, restart="swap_head").execute() == 0
    assert machine.started == ["finetune", "swap_head", "finetune"]
    assert len(list(machine.folder.path.glob("replaced/*/stage.json"))) == 3


def test_a_model_from_elsewhere_must_be_there_whenever_swap_head_is_to_run(machine: Machine):
    model = machine.root / "imported"
    run = partial(machine.open, "stages.pretrain=null", f"stages.swap_head.model={model}", shards_of=("finetune",))
    with pytest.raises(UserError, match=r"stages\.swap_head\.model: .*config\.json is missing"):
        run()  # so a dry run says it, too
    (machine.root / "theirs.pth").touch()
    (machine.root / "theirs").mkdir()
    (machine.root / "theirs/config.json").write_text("{}")
    for theirs in (machine.root / "theirs.pth", machine.root / "theirs"):
        with pytest.raises(UserError, match=f"shardvit import {theirs} FOLDER"):
            run(f"stages.swap_head.model={theirs}")
    meta = SavedModelMeta(
        model=load_recipe("digits").model, image_size=16, num_classes=1, class_names=("x",), head="linear"
    )
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"shardvit": meta.model_dump(mode="json")}))
    (model / "model.safetensors").touch()
    assert run().execute() == 0
    shutil.rmtree(model)
    run()  # what is done needs it no more
    run(restart="finetune")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        run(restart="swap_head")
    assert machine.started == ["swap_head", "finetune"]


def test_a_broken_record_is_made_again_from_the_checkpoints_before_anything_is_started(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipeline_run, "check_newest", lambda root, *, expected: None)  # the checkpoint is a stand-in
    machine.open().execute()
    machine.started.clear()
    save(machine.folder.checkpoints("pretrain"), 400, ranks=one_rank())
    for stage in ("pretrain", "swap_head"):
        (machine.folder.stage(stage) / "stage.json").write_text('{"images_seen": "many"}')
    run = machine.open()
    assert run.execute(mode="dry-run") == 0 and not list(machine.folder.path.glob("*/stage.json.broken"))
    capsys.readouterr()

    def outcome(launch: Launch) -> int:
        if launch.stage == "pretrain":
            assert machine.folder.record("pretrain").last_saved_step == 400
        machine.folder.update(launch.stage, state="done")
        return 0

    machine.outcome = outcome
    assert run.execute() == 0
    assert machine.started == ["pretrain", "swap_head"]  # and fine-tuning, which is whole, is not done again
    said = capsys.readouterr().out
    assert "step-00000400" in said and said.count("stage.json.broken") == 2


def test_a_broken_record_without_checkpoints_is_mended_by_the_restart_that_its_message_asks_for(machine: Machine):
    machine.open().execute()
    for stage in ("finetune", "pretrain"):
        (machine.folder.stage(stage) / "stage.json").write_text("{")
        with pytest.raises(UserError, match=f"--restart {stage}"):
            machine.open().execute()
        machine.started.clear()
        assert machine.open(restart=stage).execute() == 0
        assert machine.started == list(STAGES[STAGES.index(stage) :])


def test_two_runs_of_one_folder_are_refused(machine: Machine):
    run = machine.open()
    with locked(run.folder.path / ".run.lock", what="it"), pytest.raises(UserError, match="in use by process"):
        run.execute()
    assert machine.started == []

    def outcome(launch: Launch) -> int:
        with pytest.raises(UserError, match="in use by process"):
            machine.open().execute()
        return 1

    machine.outcome = outcome
    assert machine.open().execute() == 1
    assert machine.started == ["pretrain"]


@pytest.mark.parametrize(
    ("gpus", "overrides", "processes"),
    [(0, ["processes=auto"], 1), (4, ["processes=auto"], 4), (4, ["processes=2"], 2), (0, ["processes=4"], 4)],
)
def test_processes_follow_recipe_and_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: int, overrides: list[str], processes: int
):
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: gpus)
    assert machine.open(*overrides).processes == processes


def test_what_the_machine_cannot_do_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="fp16 needs a GPU: use bf16 or fp32"):
        machine.open("engine.precision=fp16")
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 1)
    with pytest.raises(UserError, match=r"processes is 2, but this machine has 1 GPUs: set processes=1"):
        machine.open()
    machine.open("processes=1", "engine.precision=fp16")


@pytest.mark.parametrize(("state", "stages"), [("running", ["pretrain"]), ("done", ["pretrain"])])
def test_a_user_who_stops_it_at_once_is_told_no_false_reason(
    machine: Machine, capsys: pytest.CaptureFixture[str], state: str, stages: list[str]
):
    def outcome(launch: Launch) -> int:
        machine.folder.update(launch.stage, state=state, last_saved_step=300)
        raise KeyboardInterrupt

    machine.outcome = outcome
    if state == "done":  # it came to its end instead; the next stage is not begun
        with pytest.raises(KeyboardInterrupt):
            machine.open().execute(max_restarts=5)
        assert "not finished" not in capsys.readouterr().err
    else:
        assert machine.open().execute(max_restarts=5) == EXIT_STOPPED
        error = capsys.readouterr().err
        assert error == ("shardvit: pretrain is not finished (stopped): the same command resumes from step 300\n")
    assert machine.started == stages


def test_the_last_stage_that_came_to_its_end_is_done_though_somebody_wished_to_stop(machine: Machine):
    def outcome(launch: Launch) -> int:
        machine.folder.update(launch.stage, state="done")
        if launch.stage == "finetune":
            raise KeyboardInterrupt
        return 0

    machine.outcome = outcome
    assert machine.open().execute() == 0


def test_a_run_folder_that_cannot_be_written_is_named_before_anything_starts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, *args: object, **more: object) -> int:
        raise OSError(number, os.strerror(number), os.fspath(path))

    run = machine.open()
    monkeypatch.setattr("shardvit.launch.run.lock.os.open", refuse)
    number = errno.EROFS
    with pytest.raises(UserError, match=rf"{machine.folder.path}\S* cannot be written: .*read-only file system"):
        run.execute()
    number = errno.EIO  # any other error keeps its traceback
    with pytest.raises(OSError, match="Input/output"):
        run.execute()
    assert machine.started == []


def test_a_frozen_part_that_the_model_lacks_is_refused_before_anything_starts(machine: Machine):
    for name, near in (("patch_embeding", "patch_embedding"), ("blokcs.0.norm1.bias", "blocks.0.norm1.bias")):
        with pytest.raises(UserError, match=rf"stages\.finetune\.optimizer\.frozen: .*{near}"):
            machine.open(f"stages.finetune.optimizer.frozen=[{name}]")
        recipe = load_recipe("digits", overrides=[f"finetune.optimizer.frozen=[{name}]"])
        with pytest.raises(UserError, match=rf"stages\.finetune\.optimizer\.frozen: .*{near}"):  # without shards
            PipelineRun.open(recipe, runs_root=machine.root / "other", shards="if there")
    machine.open("stages.finetune.optimizer.frozen=[patch_embedding, 'blocks.0.*']")
    masked = load_recipe("cifar10_masked", overrides=["masked_patch.optimizer.frozen=[patch_embeding]"])
    with pytest.raises(UserError, match=r"stages\.masked_patch\.optimizer\.frozen: .*patch_embedding"):
        PipelineRun.open(masked, runs_root=machine.root / "other", shards="if there")
