"""A recipe's keys about saving, watching and slow ranks reach the part that does it; lost checkpoints are refused."""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.checkpoint.identity import checkpoint_identity
from shardvit.pipeline.checkpoint.mend_record import mend_records
from shardvit.pipeline.checkpoint.store import Restored
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import StopFlag
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.runs.logs import MetricsLog
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import written_by
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.initial_model import StageStart
from shardvit.pipeline.stage.stage_data import Stage, open_data
from shardvit.pipeline.training import assembly, stage_training
from shardvit.pipeline.training.after_step import TrainingFailed, TrainJob
from shardvit.pipeline.training.assembly import make_job
from shardvit.pipeline.training.stage_training import train_stage
from tests.data_shards.small_set import touch_up
from tests.saving import Gate, TinyEngine, one_rank, state_at, steps
from tests.small_recipe import SMALL, small_recipe, small_stage

TOTAL_STEPS = 40


class Reached(Exception):
    """The test has seen what it came for."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "digits"
    pack("digits", out, classes=("0", "1"), holdout=0.2, samples_per_shard=100, report=lambda line: None)
    return out


class OwnStage:
    """A stage `pretrain` of one process, on an engine of one number."""

    def __init__(self, root: Path, shards: Path) -> None:
        self.root, self.shards = root, shards
        self.notes: list[str] = []
        self.folder = RunFolder(runs_root=root / "runs", name="r")
        self.folder.stage("pretrain").mkdir(parents=True)
        self.report: Any = SimpleNamespace(
            note=self.notes.append, event=lambda kind, text, *, step: None, attempt_seconds=50.0
        )
        self.engine: Any = TinyEngine()
        self.engine.device = torch.device("cpu")
        self.engine.weights = dict
        self.engine.close = lambda: None

    @property
    def checkpoints(self) -> Path:
        return self.folder.checkpoints("pretrain")

    def context(self, *, engine: dict[str, Any], **stage: Any) -> StageContext:
        keys = small_stage(self.shards, global_batch_size=8, duration=f"{TOTAL_STEPS} steps", **stage)
        model = SMALL | {"width": 8}
        recipe = Recipe.model_validate(small_recipe(model=model, engine=engine, pretrain_=keys))
        ranks: Any = one_rank()
        return StageContext(recipe, self.folder, ranks, StopFlag(), {})

    def job(self, *, engine: dict[str, Any] | None = None, watch: Any = None, **stage: Any) -> TrainJob:
        """What the loop is given."""
        context = self.context(engine=engine or {"saving": "blocking"}, **stage)
        task: Any = SimpleNamespace(score="top1")
        return make_job(
            context,
            self.of(context),
            task=task,
            engine=self.engine,
            state=TrainState(),
            watch=watch,
            report=self.report,
        )

    def of(self, context: StageContext) -> Stage:
        recipe = context.recipe
        data = open_data(recipe, stage="pretrain", report=lambda line: None)
        plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=1)
        return Stage(recipe, "pretrain", data, plan, run=self.folder)

    def train(self, *, engine: dict[str, Any] | None = None, **stage: Any) -> None:
        """The whole stage."""
        context = self.context(engine=engine or {}, **stage)
        train_stage(context, self.of(context), model=torch.nn.Linear(10, 100), start=StageStart())


@pytest.fixture
def stage(tmp_path: Path, shards: Path) -> OwnStage:
    return OwnStage(tmp_path, shards)


def kept(job: TrainJob, stage: OwnStage, losses: dict[int, float] | None = None, scores: Any = None) -> list[int]:
    """The checkpoints that stay of those at the steps 10, 20, 30 and 40, each with an evaluation."""
    for step in (10, 20, 30, 40):
        values = {"val/loss": (losses or {}).get(step, 1.0), "val/top1": (scores or {}).get(step, 0.5)}
        job.saver.save(state_at(step, evaluation=values, evaluation_step=step))
    return steps(stage.checkpoints)


@pytest.mark.parametrize(
    ("keys", "stay"),
    [
        ({"keep_checkpoints": 3}, [20, 30, 40]),
        ({"keep_checkpoints": 1, "rollback": {"steps_before": 12}}, [20, 30, 40]),  # three skipped steps, 12 before
        ({"keep_checkpoints": 1, "keep_every": "50%"}, [20, 40]),
        ({"keep_checkpoints": 1, "keep_best": "loss"}, [10, 40]),
        ({"keep_checkpoints": 1, "keep_best": "score"}, [30, 40]),
    ],
    ids=str,
)
def test_the_checkpoints_that_the_recipe_keeps_stay(stage: OwnStage, keys: dict[str, Any], stay: list[int]) -> None:
    job = stage.job(**keys)
    assert job.plan.save_after_evaluations == ("keep_best" in keys)
    assert kept(job, stage, losses={10: 0.1}, scores={30: 0.9}) == stay


@pytest.mark.parametrize(("model", "best"), [("ema", 20), ("weights", 30)])
def test_of_a_stage_with_a_moving_average_the_best_is_judged_by_the_weights_that_it_writes(
    stage: OwnStage, model: str, best: int
) -> None:
    job = stage.job(keep_checkpoints=1, keep_best="score", ema={"model": model})
    for step in (10, 20, 30, 40):
        values = {"val/top1": 0.9 if step == 30 else 0.5, "val/ema_top1": 0.9 if step == 20 else 0.5}
        job.saver.save(state_at(step, evaluation=values, evaluation_step=step))
    assert steps(stage.checkpoints) == [best, 40]


@pytest.mark.parametrize(("ema", "written"), [(None, 1.0), ({"model": "weights"}, 1.0), ({}, 2.0)])
def test_the_stages_model_are_the_weights_or_their_average(
    ends: OwnStage, monkeypatch: pytest.MonkeyPatch, ema: Any, written: float
) -> None:
    numbers, saved = [1.0], []
    ends.engine.averaged = lambda: contextlib.closing(SimpleNamespace(close=numbers.pop, at=numbers.append(2.0)))
    ends.engine.weights = lambda: {"w": numbers[-1]}
    monkeypatch.setattr(assembly, "save_for_others", lambda *where, meta: saved.append((where[1], meta.ema_decay)))
    ends.train(ema=ema)
    assert saved == [({"w": written}, 0.9999 if written == 2.0 else None)]
    assert ends.folder.record("pretrain").model.get("ema_decay") == saved[0][1]
    assert numbers == [1.0]


@pytest.mark.parametrize(("minutes", "due"), [(0.0, False), (2.0, True), (3.0, False)])
def test_the_clock_is_set_to_save_every_minutes(
    stage: OwnStage, minutes: float, due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("shardvit.pipeline.ranks.stopping.time", SimpleNamespace(monotonic=lambda: now[0]))
    job = stage.job(save_every_minutes=minutes)
    now[0] += 120.0
    assert job.requests.mine.save == due


def test_a_checkpoint_is_written_while_training_goes_on_or_while_it_waits(
    stage: OwnStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.job(engine={"saving": "blocking"}).saver.save(state_at(1))
    assert steps(stage.checkpoints) == [1]
    gate = Gate(monkeypatch)
    in_background = stage.job(engine={"saving": "background"}).saver
    in_background.save(state_at(2))  # comes back though nothing can be written yet
    assert steps(stage.checkpoints) == [1]
    gate.opened.set()
    in_background.finish()
    assert steps(stage.checkpoints) == [1, 2]


def test_what_is_committed_is_on_record_with_its_writer_its_recipe_and_its_identity(stage: OwnStage) -> None:
    job = stage.job()
    job.saver.save(state_at(3))
    record = stage.folder.record("pretrain")
    assert (record.last_saved_step, record.images_seen) == (3, 64 * 3)
    content = json.loads((stage.checkpoints / "step-00000003" / "state.json").read_text())
    recipe = stage.context(engine={"saving": "blocking"}).recipe
    assert content["identity"] == checkpoint_identity(recipe, stage="pretrain", processes=1)
    assert content["written_by"] | {"time": ""} == written_by() | {"time": ""}
    assert (stage.checkpoints / "step-00000003" / "recipe.yaml").read_text() == dump_recipe(recipe)


def test_a_save_that_takes_long_is_no_hang_to_the_watch(stage: OwnStage, monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[tuple[int, str]] = set()
    gate = Gate(monkeypatch)

    def progress(step: int, *, status: str) -> None:
        told.add((step, status))
        gate.opened.set()

    monkeypatch.setattr("shardvit.pipeline.checkpoint.saver._PROGRESS_SECONDS", 0.01)
    stage.job(watch=SimpleNamespace(progress=progress)).saver.save(state_at(4))
    assert told == {(4, "saving a checkpoint")}


@pytest.fixture
def ends(stage: OwnStage, monkeypatch: pytest.MonkeyPatch) -> OwnStage:
    """A stage whose steps, model and report are stand-ins; what is between them is real."""

    @contextlib.contextmanager
    def silent_report(*arguments: Any, **more: Any) -> Iterator[Any]:
        yield stage.report

    def trained(job: TrainJob, state: TrainState) -> TrainState:
        job.saver.stall_seconds = 5.0
        return replace(state, step=TOTAL_STEPS, evaluation={"val/loss": 1.0, "val/ema_loss": 1.0})

    monkeypatch.setattr(stage_training, "open_engine", lambda *arguments, **more: stage.engine)
    monkeypatch.setattr(stage_training, "stage_report", silent_report)
    monkeypatch.setattr(stage_training, "train", trained)
    monkeypatch.setattr(assembly, "save_for_others", lambda *arguments, **more: None)
    monkeypatch.setattr(assembly, "weights_digest", lambda folder: "digest")
    return stage


def test_a_stage_that_goes_on_says_from_where_and_what_has_changed_since(
    ends: OwnStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.train()
    assert not any("resuming" in note for note in ends.notes)
    found = Restored(
        folder=ends.root,
        state=TrainState(step=10, images_seen=80),
        notes=("step-00000020 is damaged",),
        identity=checkpoint_identity(ends.context(engine={}).recipe, stage="pretrain", processes=4),
        written_by=written_by() | {"torch": "1.0"},
    )
    monkeypatch.setattr("shardvit.pipeline.training.rollback.restore_checkpoint", lambda *arguments, **more: found)
    ends.notes.clear()
    ends.train()
    text = "\n".join(ends.notes)
    assert "step-00000020 is damaged\nresuming from" in text and "step 10 of 40" in text
    assert "processes 4 -> 1" in text and "torch 1.0 ->" in text


def test_its_last_words_are_how_long_it_stood_still(ends: OwnStage) -> None:
    ends.train()
    last = ends.notes[-1]
    assert last == "pretrain: training stood still for its checkpoints for 5.0 s, 10.0% of the time"
    assert ends.folder.record("pretrain").state == "done"


def test_an_evaluation_that_was_better_than_the_last_is_named_and_recorded(
    ends: OwnStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(job: TrainJob, state: TrainState) -> TrainState:
        with MetricsLog(ends.folder.stage("pretrain") / "metrics.jsonl", resume_step=-1) as log:
            for step, top1 in ((10, 0.3), (20, 0.627), (40, 0.529)):
                log.append(step=step, images_seen=0, metrics={"val/top1": top1, "val/loss": 1.0})
        return replace(state, step=TOTAL_STEPS, evaluation={"val/top1": 0.529, "val/loss": 1.0})

    monkeypatch.setattr(stage_training, "train", trained)
    ends.train()
    assert "0.6270 after step 20" in ends.notes[-1]
    results = ends.folder.record("pretrain").results
    assert results == {"val/top1": 0.529, "val/loss": 1.0, "best/step": 20.0, "best/val/top1": 0.627}


@pytest.mark.parametrize(
    ("evaluation", "ema", "fails"),
    [
        ({"val/loss": math.nan, "val/top1": 0.0}, None, True),
        ({"val/loss": math.inf, "val/top1": 0.5}, None, True),
        ({"val/loss": math.inf, "val/ema_loss": 1.0}, {"model": "ema"}, False),  # the average is the model
        ({"val/loss": 1.0, "val/ema_loss": math.nan}, {"model": "ema"}, True),
        ({"val/loss": 1.0, "val/ema_loss": math.nan}, {"model": "weights"}, False),
    ],
)
def test_a_stage_whose_held_out_loss_is_not_finite_has_failed_and_leaves_no_model(
    ends: OwnStage,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: dict[str, float],
    ema: dict[str, object] | None,
    fails: bool,
) -> None:
    written: list[object] = []
    ends.engine.averaged = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(assembly, "save_for_others", lambda *where, **more: written.append(where))
    monkeypatch.setattr(
        stage_training, "train", lambda job, state: replace(state, step=TOTAL_STEPS, evaluation=evaluation)
    )
    if not fails:
        ends.train(ema=ema)
        assert written and ends.folder.record("pretrain").state == "done"
        return
    with pytest.raises(
        TrainingFailed, match=r"40, is (nan|inf).* checkpoint .*stages\.pretrain\.optimizer\.lr .*--restart pretrain"
    ):
        ends.train(ema=ema)
    assert not written and ends.folder.record("pretrain").state == "running"


def test_a_checkpoint_knows_what_went_into_its_stage(stage: OwnStage) -> None:
    stage.folder.update("pretrain", inputs={"training images": "abc"})
    stage.job().saver.save(state_at(3))
    content = json.loads((stage.checkpoints / "step-00000003" / "state.json").read_text())
    assert content["inputs"] == {"training images": "abc"}
    (stage.folder.stage("pretrain") / "stage.json").write_text("{")
    assert len(mend_records(stage.folder, ["pretrain"])) == 1
    assert stage.folder.record("pretrain").inputs == {"training images": "abc"}


def test_checkpoints_that_are_gone_are_no_reason_to_begin_from_nothing(ends: OwnStage) -> None:
    ends.folder.update("pretrain", state="running", last_saved_step=7)
    with pytest.raises(
        UserError, match=r"holds no checkpoint, but one was saved at step 7: bring it back, .*--restart pretrain"
    ):
        ends.train()
    assert ends.folder.record("pretrain").last_saved_step == 7


def test_what_could_not_be_saved_is_not_begun_and_what_is_saved_whole_needs_no_room(
    ends: OwnStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*arguments: Any, **more: Any) -> None:
        raise Reached

    monkeypatch.setattr("shardvit.pipeline.checkpoint.disk_space.free_bytes", lambda root: 15_399)
    monkeypatch.setattr(stage_training, "open_engine", opened)
    with pytest.raises(UserError, match=r"a checkpoint needs about 15.4 kB"):  # 14 bytes for each of 1100 parameters
        ends.train()
    ends.folder.update("pretrain", last_saved_step=TOTAL_STEPS)
    with pytest.raises(Reached):
        ends.train()


def test_the_watch_is_told_engine_hang_seconds(ends: OwnStage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, float]] = []

    def watch(folder: Path, *, hang_seconds: float, **more: Any) -> None:
        asked.append((folder, hang_seconds))
        raise Reached

    monkeypatch.setattr("shardvit.pipeline.stage.context.Watch", watch)
    with pytest.raises(Reached):
        ends.train(engine={"hang_seconds": 17})
    assert asked == [(ends.folder.ranks("pretrain"), 17)]


def test_data_that_have_changed_since_are_refused_on_all_ranks(ends: OwnStage, tmp_path: Path) -> None:
    ends.shards = Path(shutil.copytree(ends.shards, tmp_path / "own"))
    ends.train()
    ends.train()
    assert (ends.folder.stage("pretrain") / "data.json").exists() and ends.folder.record("pretrain").data_digest
    tar = sorted((ends.shards / "train").glob("*.tar"))[1]
    touch_up(tar)
    with pytest.raises(UserError, match=rf"training images: .*{tar.name} .*--restart pretrain"):
        ends.train()
    context = ends.context(engine={})
    told: Any = SimpleNamespace(place=Place(rank=1, world_size=2), from_main=lambda mine: "rank 0 says it")
    with pytest.raises(UserError, match=r"^rank 0 says it$"):
        replace(context, ranks=told).on_main(lambda: pytest.fail("rank 0 alone looks"))
    touch_up(tar)  # the old bytes again
    ends.train()


def test_memory_for_the_copies_is_prepared_on_a_gpu_for_all_that_a_rank_will_save(
    stage: OwnStage, monkeypatch: pytest.MonkeyPatch
):
    """By hand, under ZeRO 1 in bf16 with AdamW: masters and two moments are shared out, rank 0 adds the weights in bf16
    and exact values of what is frozen. The engine has not made its moments yet."""
    context = stage.context(engine={"zero_stage": 1, "precision": "bf16"})
    engine = stage.engine
    engine.module = torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.Linear(100, 3, bias=False))
    engine.module[1].weight.requires_grad_(False)
    trained, frozen = 1100, 300

    def bytes_of(rank: int) -> int:
        return assembly._copied_bytes(stage.of(context), engine, place=Place(rank=rank, world_size=2))

    assert bytes_of(0) == 2 * trained + 12 * trained // 2 + 4 * frozen and bytes_of(1) == 12 * trained // 2
    prepared: list[int] = []
    monkeypatch.setattr(assembly.CheckpointSaver, "prepare", lambda saver, num_bytes: prepared.append(num_bytes))
    stage.job()
    assert prepared == []
    engine.device = torch.device("cuda")
    for name in ("prefetch_to_device", "data_workers"):
        monkeypatch.setattr(assembly, name, lambda *args, **more: SimpleNamespace(count=0, kind="thread"))
    stage.job(engine={"zero_stage": 1, "precision": "bf16"})
    assert prepared == [2 * trained + 12 * trained + 4 * frozen]
