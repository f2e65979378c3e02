"""The run folder: what is done stays done, a changed recipe is refused, and a restart loses no byte."""

import json
import math
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import (
    RunFolder,
    StageRecord,
    check_inputs,
    check_model,
    recipe_digest,
    weights_digest,
)

STAGES = ("pretrain", "swap_head", "finetune")


def recipe(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides=overrides)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with all three stages done."""
    folder = RunFolder(runs_root=tmp_path / "runs", name="digits")
    folder.open(recipe())
    for number, stage in enumerate(STAGES):
        folder.update(stage, state="done", images_seen=number)
        folder.model(stage).mkdir()
        (folder.model(stage) / "model.safetensors").write_bytes(bytes([number]) * 100)
    return folder


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_record_begins_new_and_keeps_what_was_not_changed(tmp_path: Path):
    folder = RunFolder(runs_root=tmp_path, name="a")
    assert folder.record("pretrain") == StageRecord()
    assert not folder.path.exists()  # asking writes nothing
    with pytest.raises(FileNotFoundError):  # somebody has deleted or renamed it
        folder.update("pretrain", state="running")
    assert not folder.path.exists()
    folder.path.mkdir()
    folder.update("pretrain", state="running", inputs={"images": "abc"})
    folder.update("pretrain", last_saved_step=7, seconds=0.1 + 0.2)
    record = folder.record("pretrain")
    assert record == StageRecord(state="running", last_saved_step=7, seconds=0.1 + 0.2, inputs={"images": "abc"})
    assert [path.name for path in folder.stage("pretrain").iterdir()] == ["stage.json"]
    with pytest.raises(TypeError):
        folder.update("pretrain", stat="done")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"state": "done", "speed": 3}', "\udcff", "[" * 3000, '{"inputs": ' + "[" * 3000),
        *('{"images_seen": "many"}', '{"images_seen": -1}', '{"images_seen": 1.5}', '{"last_saved_step": true}'),
        *('{"last_saved_step": ' + "9" * 5000 + "}", '{"images_seen": ' + "9" * 100 + "}", '{"seconds": NaN}'),
        *('{"state": "perhaps"}', '{"inputs": ["a"]}', '{"results": {"val/top1": "high"}}', '{"model_digest": 3}'),
    ],
)
def test_a_broken_record_is_named_with_the_way_out(folder: RunFolder, text: str):
    path = folder.stage("finetune") / "stage.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"finetune/stage.json is broken .*shardvit run") as caught:
        folder.record("finetune")
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert folder.peek("finetune") == StageRecord(state="running")
    assert path.read_bytes() == text.encode(errors="surrogateescape")


def test_every_number_that_is_written_is_read(folder: RunFolder):
    results = {"a": float("inf"), "b": -0.0, "c": 1e-320, "d": 3.0}
    folder.update("finetune", results=results | {"e": float("nan")}, seconds=0.1 + 0.2)
    read = folder.record("finetune")
    assert read.seconds == 0.1 + 0.2 and math.isnan(read.results["e"])
    assert {key: read.results[key] for key in results} == results


def test_complete_means_every_stage_of_the_recipe(folder: RunFolder):
    assert folder.is_complete(recipe())
    folder.update("finetune", state="running")
    assert not folder.is_complete(recipe())
    assert folder.is_complete(recipe("stages.finetune=null", "stages.swap_head=null"))


def test_the_same_recipe_passes_and_a_changed_one_is_refused_with_what_differs(folder: RunFolder):
    before = files(folder.path)
    folder.check_recipe(recipe())
    folder.check_recipe(recipe("processes=5", "data.workers=2", "stages.finetune.save_every=1 step"))
    with pytest.raises(UserError) as caught:
        folder.check_recipe(recipe("seed=3", "stages.pretrain.optimizer.lr=0.5"))
    text = str(caught.value)
    assert "seed: 0 -> 3" in text and "stages.pretrain.optimizer.lr: 0.002 -> 0.5" in text and "--restart" in text
    assert str(folder.path) in text
    assert files(folder.path) == before


@pytest.mark.parametrize(
    ("restart", "override", "accepted"),
    [
        ("finetune", "stages.finetune.optimizer.lr=0.5", True),
        ("finetune", "stages.pretrain.optimizer.lr=0.5", False),
        ("finetune", "seed=1", False),
        ("finetune", "model.depth=2", False),
        ("swap_head", "stages.finetune.optimizer.lr=0.5", True),
        ("swap_head", "stages.pretrain.label_smoothing=0.1", False),
        ("pretrain", "stages.pretrain.optimizer.lr=0.5", True),
        ("pretrain", "model.depth=2", True),
        ("pretrain", "seed=1", True),
    ],
)
def test_a_restart_accepts_what_touches_no_stage_that_is_kept(
    folder: RunFolder, restart: str, override: str, accepted: bool
):
    if accepted:
        folder.check_recipe(recipe(override), restart=restart)
    else:
        with pytest.raises(UserError, match=override.split("=")[0]):
            folder.check_recipe(recipe(override), restart=restart)
    with pytest.raises(UserError):
        folder.check_recipe(recipe(override))  # and none of it without --restart


def test_stages_without_a_recipe_are_refused(folder: RunFolder):
    (folder.path / "recipe.yaml").unlink()
    with pytest.raises(UserError, match=r"recipe.yaml is missing"):
        folder.check_recipe(recipe())


def test_a_restart_moves_aside_and_keeps_every_byte(folder: RunFolder):
    before = files(folder.path)
    notes = folder.open(recipe("stages.finetune.optimizer.lr=0.5"), restart="swap_head")
    assert len(notes) == 2 and all("replaced" in note for note in notes)
    assert folder.record("pretrain").state == "done"
    assert folder.record("swap_head") == folder.record("finetune") == StageRecord()
    after = files(folder.path)
    moved = {}
    for name, content in after.items():
        parts = name.split("/")
        moved["/".join([parts[1].rsplit("-", 2)[0], *parts[2:]]) if parts[0] == "replaced" else name] = content
    assert {**moved, "recipe.yaml": b""} == {**before, "recipe.yaml": b""}
    folder.check_recipe(recipe("stages.finetune.optimizer.lr=0.5"))  # the new recipe is the run's now


def test_two_restarts_in_one_second_keep_both(folder: RunFolder):
    for number in range(3):
        folder.update("finetune", images_seen=100 + number)
        folder.open(recipe(), restart="finetune")
    kept = [json.loads(path.read_text())["images_seen"] for path in folder.path.glob("replaced/*/stage.json")]
    assert sorted(kept) == [100, 101, 102]


def test_the_digest_of_a_stage_leaves_out_free_keys_and_later_stages():
    def digest(*overrides: str, stage: str = "pretrain") -> str:
        return recipe_digest(recipe(*overrides), stage=stage)

    base = digest()
    for same in (
        "name=other",
        "processes=3",
        "data.workers=2",
        "stages.pretrain.save_every=1 step",
        "stages.pretrain.save_every_minutes=5",
        "stages.pretrain.keep_best=score",
        "stages.pretrain.keep_every=50%",
        "engine.zero_stage=3",
        "engine.max_micro_batch_size=4",
        "engine.activation_checkpointing=true",
        "engine.hang_seconds=5",
        "engine.saving=blocking",
        "stages.finetune.image_size=32",
    ):
        assert digest(same) == base, same
    for other in ("seed=1", "model.depth=2", "stages.pretrain.image_size=32", "engine.precision=bf16", "data.lanes=2"):
        assert digest(other) != base, other
    tuned = digest(stage="finetune")
    assert tuned != base
    for other in ("stages.finetune.image_size=32", "stages.pretrain.image_size=32"):
        assert digest(other, stage="finetune") != tuned, other


def test_other_data_or_weights_than_a_stage_began_with_are_refused(folder: RunFolder):
    folder.update("finetune", inputs={"training images": "a", "weights": "b"})
    check_inputs(folder, stage="finetune", inputs={"training images": "a", "weights": "b", "held-out images": "c"})
    with pytest.raises(UserError, match=r"finetune was begun with other weights .*--restart finetune"):
        check_inputs(folder, stage="finetune", inputs={"training images": "a", "weights": "x"})
    with pytest.raises(UserError, match="other training images and weights"):
        check_inputs(folder, stage="finetune", inputs={"training images": "x", "weights": "x"})


def test_the_digest_of_weights_changes_with_one_bit(folder: RunFolder):
    digests = {weights_digest(folder.model(stage)) for stage in STAGES}
    assert len(digests) == 3
    path = folder.model("pretrain") / "model.safetensors"
    before = weights_digest(folder.model("pretrain"))
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder.model("pretrain")) != before


def test_a_model_that_has_changed_since_its_stage_left_it_is_refused(folder: RunFolder):
    folder.update("pretrain", model_digest=weights_digest(folder.model("pretrain")))
    assert check_model(folder, stage="pretrain") == folder.model("pretrain")
    path = folder.model("pretrain") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"are not those that pretrain left: .*--restart pretrain"):
        check_model(folder, stage="pretrain")
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        check_model(folder, stage="pretrain")


def test_a_key_that_is_written_out_at_its_default_changes_no_digest():
    """So neither does a key that a later version adds."""
    digits = load_recipe("digits")
    written_out = load_recipe("digits", overrides=["data.decoder=auto", "model.position=learned_1d"])
    assert recipe_digest(digits, stage="pretrain") == recipe_digest(written_out, stage="pretrain")
    for override in ("stages.pretrain.augment.mixup_alpha=0.2", "data.max_image_pixels=1000000"):
        changed = load_recipe("digits", overrides=[override])
        assert recipe_digest(changed, stage="pretrain") != recipe_digest(digits, stage="pretrain")
