"""Whose checkpoint it is: what must agree, what need not, and the sentence when it does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.identity import STATE, check_identity, check_newest, checkpoint_identity
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.run_folder import checkpoint_folders


def identity(*overrides: str, processes: int = 2) -> dict[str, Any]:
    return checkpoint_identity(load_recipe("digits", overrides=overrides), stage="pretrain", processes=processes)


def write(root: Path, step: int, content: object) -> Path:
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / STATE).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_same_run_passes(tmp_path: Path):
    survived = json.loads(json.dumps(identity()))
    check_identity(survived, identity("data.workers=3", "stages.finetune.image_size=32"), folder=tmp_path)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=1", "with recipe"),
        ("engine.precision=bf16", "with precision fp32 (now bf16): set engine.precision=fp32,"),
        ("engine.backend=accelerate", "with backend deepspeed (now accelerate): set engine.backend=deepspeed,"),
    ],
)
def test_another_run_is_named_with_what_differs(tmp_path: Path, override: str, named: str):
    with pytest.raises(UserError) as caught:
        check_identity(identity(), identity(override), folder=tmp_path)
    text = str(caught.value)
    assert named in text and str(tmp_path) in text and "--restart pretrain" in text and "\n" not in text


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [((), 4), ((), 1), (("engine.zero_stage=3",), 2), (("engine.zero_stage=0",), 3)],
    ids=str,
)
def test_another_number_of_processes_or_another_zero_stage_may_go_on(
    tmp_path: Path, overrides: tuple[str, ...], processes: int
):
    """Before the launch as well as when the checkpoint is restored, where it is converted."""
    now = identity(*overrides, processes=processes)
    check_identity(identity(), now, folder=tmp_path)
    write(tmp_path, 1, {"identity": identity()})
    check_newest(tmp_path, expected=now)


def test_a_layout_that_may_differ_does_not_hide_what_may_not(tmp_path: Path):
    now = identity("engine.zero_stage=3", "engine.precision=bf16", processes=4)
    with pytest.raises(UserError, match=r"precision fp32 \(now bf16\)") as caught:
        check_identity(identity(), now, folder=tmp_path)
    assert "processes" not in str(caught.value) and "zero_stage" not in str(caught.value)
    with pytest.raises(UserError, match="continue with the recipe that wrote it"):
        check_identity(identity(), identity("seed=1", processes=4), folder=tmp_path)


def test_an_identity_without_a_key_is_another_one(tmp_path: Path):
    with pytest.raises(UserError, match="stage None"):
        check_identity({}, identity(), folder=tmp_path)
    for key in identity():
        with pytest.raises(UserError, match=f"{key} None"):
            check_identity({k: v for k, v in identity().items() if k != key}, identity(), folder=tmp_path)


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path: Path):
    assert checkpoint_folders(tmp_path / "nowhere") == []
    for step in (9, 100, 20, 12345678):
        write(tmp_path, step, {})
    (tmp_path / ".writing-step-00000200").mkdir()
    (tmp_path / "step-00000300").write_text("a file")
    for copy in ("step-best", "step-12345678-mine"):  # the user's: would sort before the newest
        (tmp_path / copy).mkdir()
    assert [int(path.name[5:]) for path in checkpoint_folders(tmp_path)] == [12345678, 100, 20, 9]


def test_the_newest_readable_one_decides(tmp_path: Path):
    check_newest(tmp_path / "nowhere", expected=identity())
    write(tmp_path, 1, {"identity": identity("seed=1")})
    with pytest.raises(UserError, match="step-00000001 was written with recipe"):
        check_newest(tmp_path, expected=identity())
    write(tmp_path, 2, {"identity": identity()})
    check_newest(tmp_path, expected=identity())
    for step, damaged in enumerate(["", "{", "{}", "[]", "3", '{"identity": 4}', "\udcff"], start=3):
        write(tmp_path, step, damaged.encode(errors="surrogateescape").decode("latin-1"))
    (tmp_path / "step-00000020").mkdir()
    check_newest(tmp_path, expected=identity())


def identity_of(processes: int, *, lanes: str = "auto") -> dict[str, object]:
    overrides = [f"data.lanes={lanes}", "stages.pretrain.global_batch_size=32768"]
    return checkpoint_identity(load_recipe("digits", overrides=overrides), stage="pretrain", processes=processes)


@pytest.mark.parametrize(("before", "now"), [(1024, 128), (128, 1024), (8, 257)])
def test_auto_lanes_do_not_cross_256_processes(before: int, now: int):
    if 32768 % max(before, now):
        now = 512
    with pytest.raises(UserError, match=r"data\.lanes"):
        check_identity(identity_of(before), identity_of(now), folder=Path("step-8"))


@pytest.mark.parametrize(("before", "now", "lanes"), [(1024, 2048, "auto"), (1, 256, "auto"), (8, 1024, "4096")])
def test_on_one_side_or_with_lanes_of_ones_own_any_number_goes_on(before: int, now: int, lanes: str):
    check_identity(identity_of(before, lanes=lanes), identity_of(now, lanes=lanes), folder=Path("step-8"))
    assert ("lanes" in identity_of(now, lanes=lanes)) == (lanes == "auto" and now > 256)
