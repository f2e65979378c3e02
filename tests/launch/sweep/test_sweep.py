"""A sweep's runs: which there are, on which images, in which order; and what is done when it is typed again."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.start import Launch
from shardvit.launch.run.lock import locked
from shardvit.launch.sweep import local
from shardvit.launch.sweep.local import run_sweep
from shardvit.launch.sweep.outline import outline
from shardvit.launch.sweep.points import Sweep, open_point, plan_sweep
from shardvit.pipeline.recipe.io import load_recipe, parse_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR
from shardvit.pipeline.runs.run_folder import RunFolder, recipe_digest
from tests.launch.machine import Machine, each_once, on_shards

# `main` reads sys.argv, which is what `call` sets.

LR = "stages.finetune.optimizer.lr"
Told = list[tuple[str, str | None]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What MLflow would be told: the status, and the chosen point."""
    told: Told = []
    monkeypatch.setattr(local, "log_to_mlflow", lambda sweep, record, status: told.append((status, record.chosen)))
    return told


@pytest.fixture
def work(machine: Machine, told: Told) -> Machine:
    """A machine on which the highest learning rate is best, and 0.5 fails."""
    machine.outcome = end_by_rate
    return machine


def end_by_rate(launch: Launch) -> int:
    folder = RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
    if launch.stage == "swap_head":
        folder.update("swap_head", state="done")
        return 0
    lr = launch.recipe.train_stage(launch.stage).optimizer.lr
    if lr == 0.5:
        folder.update(launch.stage, state="running", last_saved_step=3)
        return 1
    results = {"val/top1": lr, "val/loss": 1.0, "val/images": 10.0}
    folder.update(launch.stage, state="done", results=results, seconds=2.0)
    return 0


def plan(machine: Machine, *overrides: str, hold_out: float | None = 0.1, **options: object) -> Sweep:
    changes = each_once(*on_shards(machine.root / "shards"), *overrides)
    return plan_sweep("digits", changes, runs_root=machine.root / "runs", hold_out=hold_out, **options)  # pyright: ignore[reportArgumentType]


def started(machine: Machine) -> list[tuple[str, str]]:
    """(run, stage) of what was started since the last time."""
    found = [(launch.recipe.name, launch.stage) for launch in machine.launches]
    machine.launches.clear()
    return found


def whole(name: str) -> list[tuple[str, str]]:
    return [(name, "swap_head"), (name, "finetune")]


def test_the_runs_their_order_and_their_images(work: Machine, told: Told, capsys: pytest.CaptureFixture[str]):
    sweep = plan(work, f"{LR}=0.01,0.3,0.02")
    assert run_sweep(sweep) == 0
    launches = list(work.launches)
    pretrain = sweep.shared_stages[0].recipe.name
    expected = [(pretrain, "pretrain"), *whole("lr-0.01"), *whole("lr-0.3"), *whole("lr-0.02"), *whole("final")]
    assert started(work) == expected
    for launch in launches:
        if launch.stage != "finetune":
            continue
        config = launch.recipe.train_stage("finetune")
        parts = [(each.part, each.hold_out) for each in (*(config.train or ()), config.eval) if each]
        is_final = launch.recipe.name == "final"
        assert parts == ([(None, None), (None, None)] if is_final else [("rest", 0.1), ("held_out", 0.1)])
        assert (config.eval.shards == config.train[0].shards) == (not is_final)
        assert config.optimizer.lr == (0.3 if is_final else float(launch.recipe.name.partition("-")[2]))
    tree = json.loads((sweep.root / "sweep.json").read_text())
    assert (tree["chosen"], tree["final"]["score"], tree["hold_out"]) == ("lr-0.3", 0.3, 0.1)
    assert told[0] == ("RUNNING", None) and told[-1] == ("FINISHED", "lr-0.3")
    assert "chosen" in capsys.readouterr().out
    assert run_sweep(sweep) == 0 and started(work) == []
    final = parse_recipe(sweep.root / "final" / "recipe.yaml")
    alone = load_recipe("digits", overrides=[*on_shards(work.root / "shards"), f"{LR}=0.3"])
    assert recipe_digest(final, stage="finetune") == recipe_digest(alone, stage="finetune")
    moved = sweep.root.parent.rename(work.root / "elsewhere")  # each run is complete, with its link
    for name in ("lr-0.01", "lr-0.3", "final"):
        folder = RunFolder(runs_root=moved / sweep.root.name, name=name)
        assert folder.is_complete(parse_recipe(folder.path / "recipe.yaml"))


def test_an_interrupted_point_goes_on_and_done_ones_are_kept(work: Machine, told: Told):
    def stop_once(launch: Launch) -> int:
        if launch.recipe.name == "lr-0.3" and launch.stage == "finetune":
            work.outcome = end_by_rate
            RunFolder(runs_root=launch.runs_root, name="lr-0.3").update("finetune", state="running", last_saved_step=5)
            return EXIT_STOPPED
        return end_by_rate(launch)

    work.outcome = stop_once
    assert run_sweep(plan(work, f"{LR}=0.01,0.3")) == EXIT_STOPPED and told[-1] == ("KILLED", None)
    assert started(work)[-1] == ("lr-0.3", "finetune")
    assert run_sweep(plan(work, f"{LR}=0.01,0.3")) == 0
    assert started(work) == [("lr-0.3", "finetune"), *whole("final")]


def test_a_changed_grid_keeps_what_is_unchanged_and_moves_another_final_run_aside(work: Machine):
    first = plan(work, f"{LR}=0.01,0.3")
    run_sweep(first)
    started(work)
    again = plan(work, f"{LR}=0.01,0.4")
    assert run_sweep(again) == 0
    assert started(work) == [*whole("lr-0.4"), *whole("final")]
    assert parse_recipe(again.root / "final" / "recipe.yaml").train_stage("finetune").optimizer.lr == 0.4
    assert list((again.root / "final" / "replaced").glob("finetune-*/stage.json"))
    assert first.folder("lr-0.3").record("finetune").state == "done"


def test_a_grid_is_widened_while_the_best_point_lies_at_its_edge(work: Machine, capsys: pytest.CaptureFixture[str]):
    def best_at_27(launch: Launch) -> int:
        code = end_by_rate(launch)
        folder = RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
        if launch.stage == "finetune":
            lr = launch.recipe.train_stage("finetune").optimizer.lr
            results = {"val/top1": 1 - abs(lr - 0.27), "val/loss": 1.0, "val/images": 10.0}
            folder.update("finetune", state="done", results=results)
        return code

    work.outcome = best_at_27
    grid = ("0.01", "0.03")
    first = plan(work, f"{LR}={','.join(grid)}")
    widen = partial(plan, work, f"{LR}={','.join(grid)}")
    assert run_sweep(first, widen=widen) == 0
    names = [name for name, stage in started(work) if stage == "finetune"]
    assert names == ["lr-0.01", "lr-0.03", "lr-0.09", "lr-0.27", "lr-0.81", "final"]  # each once
    tree = json.loads((first.root / "sweep.json").read_text())
    assert tree["chosen"] == "lr-0.27" and len(tree["points"]) == 5
    assert "edge" not in capsys.readouterr().out.rpartition("Chosen")[2]
    assert run_sweep(plan(work, f"{LR}={','.join(grid)}"), widen=widen) == 0 and started(work) == []
    assert parse_recipe(first.root / "final" / "recipe.yaml").train_stage("finetune").optimizer.lr == 0.27


def test_a_grid_is_not_widened_into_what_the_recipe_refuses(work: Machine, capsys: pytest.CaptureFixture[str]):
    def best_is_most_dropout(launch: Launch) -> int:
        code, folder = end_by_rate(launch), RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
        if launch.stage == "finetune":
            rate = launch.recipe.train_stage("finetune").dropout
            folder.update("finetune", results={"val/top1": rate, "val/loss": 1.0, "val/images": 10.0})
        return code

    work.outcome = best_is_most_dropout
    key = "stages.finetune.dropout"
    named = ("name=other", f"{key}=0.4,0.8")
    assert run_sweep(plan(work, *named), widen=partial(plan, work, "name=other")) == 0
    tuned = [name for name, stage in started(work) if stage == "finetune"]
    assert tuned == ["dropout-0.4", "dropout-0.8", "final"]
    said = capsys.readouterr().err
    assert "not widened" in said and "dropout" in said


def test_the_command_widens_what_it_has_read_three_times_at_most(
    work: Machine, call: Callable[..., tuple[int, str, str]], told: Told
) -> None:
    asked = (
        "sweep",
        "digits",
        *on_shards(work.root / "shards"),
        f"{LR}=0.01,0.02",
        "--hold-out",
        "10%",
        "--runs",
        str(work.root / "runs"),
    )
    code, out, _ = call(*asked, "--widen", "--dry-run")
    assert code == 0 and "--widen" in out and started(work) == []
    code, out, _ = call(*asked, "--widen")
    tuned = [name for name, stage in started(work) if stage == "finetune"]
    assert code == 0 and tuned == ["lr-0.01", "lr-0.02", "lr-0.04", "lr-0.08", "lr-0.16", "final"]
    assert "lies at the edge" in out


def test_a_failed_point_is_shown_not_chosen_and_tried_again(work: Machine, capsys: pytest.CaptureFixture[str]):
    assert run_sweep(plan(work, f"{LR}=0.01,0.5,0.3")) == 0
    assert started(work)[-1] == ("final", "finetune")
    tree = json.loads((work.root / "runs" / "digits-sweep" / "sweep.json").read_text())
    assert [one["state"] for one in tree["points"]] == ["done", "failed", "done"] and tree["chosen"] == "lr-0.3"
    assert "failed" in capsys.readouterr().out
    run_sweep(plan(work, f"{LR}=0.01,0.5,0.3"))
    assert started(work) == [("lr-0.5", "finetune")]


def test_a_key_of_an_earlier_stage_trains_that_once_for_each_value_and_if_all_fail_there_is_no_final_run(
    work: Machine, told: Told, capsys: pytest.CaptureFixture[str]
):
    work.outcome = fail
    sweep = plan(work, "stages.pretrain.optimizer.lr=0.001,0.002", f"{LR}=0.01,0.3")
    assert run_sweep(sweep) == 1 and told[-1][0] == "FAILED" and "failed" in capsys.readouterr().out
    runs = started(work)
    assert sum(stage == "pretrain" for _, stage in runs) == 2 == len(sweep.shared_stages)
    assert len({point.name for point in sweep.points}) == 4 and not (sweep.root / "final").exists()


def fail(launch: Launch) -> int:
    if launch.stage == "finetune":
        RunFolder(runs_root=launch.runs_root, name=launch.recipe.name).update("finetune", state="running")
        return 1
    return end_by_rate(launch)


def test_a_mistake_or_a_full_disk_ends_the_sweep(work: Machine):
    work.outcome = lambda launch: EXIT_USER_ERROR if launch.recipe.name == "lr-0.01" else end_by_rate(launch)
    assert run_sweep(plan(work, f"{LR}=0.01,0.3")) == EXIT_USER_ERROR
    assert started(work)[-1] == ("lr-0.01", "swap_head")


def test_nothing_is_started_if_one_of_the_points_could_not_run(work: Machine):
    with pytest.raises(UserError, match="64"):
        run_sweep(plan(work, "stages.finetune.global_batch_size=64,128"))
    assert started(work) == [] and not (work.root / "runs").exists()


def test_the_stage_before_is_taken_from_the_recipes_own_run_if_that_has_it(work: Machine):
    work.open().execute()
    started(work)
    sweep = plan(work, f"{LR}=0.01,0.3")
    assert run_sweep(sweep) == 0
    assert "pretrain" not in {stage for _, stage in started(work)}
    assert (sweep.root / "final" / "pretrain").resolve() == (work.folder.path / "pretrain").resolve()
    other = plan(work, f"{LR}=0.01,0.3", "stages.pretrain.optimizer.lr=0.1")
    assert other.shared_stages[0].folder.path.parent == sweep.root, "it was trained with other values"


def test_the_link_follows_the_stage_before_to_another_place(work: Machine):
    sweep = plan(work, f"{LR}=0.01,0.3")
    point, folder = sweep.points[0], sweep.folder(sweep.points[0].name)
    assert point.shared is not None
    moved = replace(point.shared, folder=RunFolder(runs_root=work.root / "elsewhere", name="digits"))
    for shared in (point.shared, moved):
        open_point(folder, point.recipe, shared=shared)
        assert folder.stage("pretrain").resolve() == shared.folder.stage("pretrain").resolve()


def test_a_sweep_in_use_is_refused(work: Machine):
    sweep = plan(work, f"{LR}=0.01,0.3")
    sweep.root.mkdir(parents=True)
    with locked(sweep.root / ".sweep.lock", what="it"), pytest.raises(UserError, match="digits-sweep"):
        run_sweep(sweep)
    assert started(work) == []


def test_pre_training_can_be_swept_and_only_the_final_run_has_what_follows(work: Machine):
    sweep = plan(work, "stages.pretrain.optimizer.lr=0.01,0.3", stage="pretrain")
    assert run_sweep(sweep) == 0
    assert started(work) == [("lr-0.01", "pretrain"), ("lr-0.3", "pretrain"), ("final", "pretrain"), *whole("final")]


def no(*overrides: str, **options: object) -> tuple[tuple[str, ...], dict[str, object]]:
    return overrides, options


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (no(f"{LR}=0.01,0.010"), "lr-0.01"),
        (no("processes=1,2"), "processes"),
        (no("name=a,b"), "name"),
        (no(f"{LR}=0.01,0.02", stage="swap_head"), "--stage swap_head"),
        (no(f"{LR}=0.01,0.02", hold_out=None), "--hold-out"),
        (no(f"{LR}=0.01,0.02", "stages.finetune.train=[a, b]"), "stages.finetune.train"),
        (no(f"{LR}=0.01,0.02", "stages.finetune.train={shards: a, part: rest, hold_out: 0.2}"), "part"),
        (no(f"{LR}=0.01,-1"), "lr"),
        (no("stages.finetune.train=a,b"), "different data"),
        (no(), "finetune.optimizer.lr"),
        (no("stages.finetune.data=cifar10", stage="pretrain"), "pretrain.optimizer.lr"),
        (no(f"{LR}=0.01,0.02", "stages.finetune.train=null", "stages.finetune.data=cifar10"), "finetune.train"),
    ],
)
def test_what_cannot_be_swept_is_refused(work: Machine, case: tuple[tuple[str, ...], dict[str, object]], key: str):
    overrides, options = case
    with pytest.raises(UserError, match=key):
        plan(work, *overrides, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("do", [run_sweep, outline])
def test_other_values_of_other_keys_are_refused_for_the_same_folder(work: Machine, do: Callable[[Sweep], object]):
    run_sweep(plan(work, f"{LR}=0.01,0.3"))
    started(work)
    with pytest.raises(UserError, match=r"stages.finetune.duration"):
        do(plan(work, f"{LR}=0.01,0.3", "stages.finetune.duration=60 steps"))
    assert started(work) == []


def test_the_outline_has_the_sizes_and_starts_nothing(work: Machine):
    sweep = plan(work, f"{LR}=0.01,0.3")
    text = outline(sweep)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["lr-0.01"][-3:] == ["90", "10", "50"] and rows["final"][-3:] == ["100", "100", "50"]
    assert "950" in rows["Left"] and not (work.root / "runs").exists()
    run_sweep(sweep)
    done = outline(plan(work, f"{LR}=0.01,0.3"))
    assert "Left to train: 0 steps" in done and done.count(" done ") == 4


def test_the_command_takes_the_share_as_people_write_it(work: Machine, call: Callable[..., tuple[int, str, str]]):
    given = ("sweep", "digits", *on_shards(work.root / "shards"), f"{LR}=0.01,0.3", "--hold-out")
    for text, held_out in (("7%", "7"), ("0.25", "25"), ("0.5 %", "1")):
        code, out, _ = call(*given, text, "--dry-run")
        assert code == 0 and next(line for line in out.splitlines() if "lr-0.01" in line).split()[-2] == held_out
    for text in ("0", "100%", "1.5", "much", "nan"):
        code, _, error = call(*given, text, "--dry-run")
        assert code == 2 and "--hold-out" in error


def test_without_a_grid_the_papers_rates_are_chosen_from(work: Machine):
    sweep = plan(work, "stages.finetune.data=cifar10", hold_out=None)
    assert [point.recipe.train_stage("finetune").optimizer.lr for point in sweep.points] == [0.001, 0.003, 0.01, 0.03]
    assert sweep.hold_out == 0.02
    rates = plan(work, "stages.finetune.data=imagenet", hold_out=None).axes[0].values
    assert rates == ("0.003", "0.01", "0.03", "0.06")


def test_a_recipe_that_holds_out_as_much_is_swept_by_that_part(work: Machine):
    sweep = plan(work, f"{LR}=0.01,0.02", "stages.finetune.hold_out=0.1")
    for point in sweep.points:
        chosen, final = (each.train_stage("finetune") for each in (point.recipe, point.final))
        assert chosen.train == final.train and chosen.train and chosen.train[0].part == "rest"
        assert chosen.eval == final.also_eval["minival"]
        assert final.eval and final.eval.part is None
    with pytest.raises(UserError, match="20 %"):
        plan(work, f"{LR}=0.01,0.02", "stages.finetune.hold_out=0.1", hold_out=0.2)
