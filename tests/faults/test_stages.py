"""Kills at the seams of the pipeline: packing, the end of a stage, between stages, head swap, export."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import NewCase
from tests.faults.harness import STEPS, Case, recipe
from tests.faults.rows import Row

PACK = "A packing that is killed continues with the finished shards by the same command, to the same bytes."
END = "A stage killed while it writes its model writes it again by the same command: no step is trained twice."
BETWEEN = "A pipeline killed between two stages continues with the next one."
SWAP = "A head swap that is killed is made again by the same command; there is no half model at any time."
EXPORT = "An export that is killed leaves no half file under the name asked for; the same command makes it."

FINETUNE_STEPS = 8


def pipeline(shards: Path) -> dict[str, Any]:
    """The suite's recipe, the head swap and a short fine-tuning."""
    content = recipe(shards)
    pretrain = content["stages"]["pretrain"]
    tuned = {**pretrain, "duration": f"{FINETUNE_STEPS} steps", "save_every": "4 steps", "augment": {}}
    content["stages"] |= {"swap_head": {}, "finetune": tuned}
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Case:
    """The undisturbed pipeline, stage by stage."""
    case = Case(tmp_path_factory.mktemp("whole") / "case", shards, content=pipeline(shards))
    for stage, processes in (("pretrain", 2), ("swap_head", 1), ("finetune", 2)):
        ended = case.start(stage=stage, processes=processes).wait()
        assert ended.code == 0 and record(case, stage)["state"] == "done", ended.output
    return case


@pytest.fixture(scope="module")
def almost(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Case:
    """The same, killed with a few steps of pre-training left: a quick way to the stage's end."""
    case = Case(tmp_path_factory.mktemp("almost") / "case", shards, content=pipeline(shards))
    case.run_until_killed(step=STEPS - 5)
    return case


@pytest.fixture
def begun(almost: Case, new_case: NewCase, shards: Path) -> Case:
    """A copy of `almost`."""
    case = new_case(content=pipeline(shards))
    shutil.copytree(almost.run, case.run)
    return case


@pytest.fixture
def pretrained(whole: Case, new_case: NewCase, shards: Path) -> Case:
    """A copy of `whole` of which only the first stage is done."""
    case = new_case(content=pipeline(shards))
    shutil.copytree(whole.run, case.run)
    for stage in ("swap_head", "finetune"):
        shutil.rmtree(case.run / stage)
    return case


def record(case: Case, stage: str) -> dict[str, Any]:
    return json.loads((case.run / stage / "stage.json").read_text())


def same_results(case: Case, whole: Case, *stages: str) -> str:
    """Asserts that the models and results of stages are those of the undisturbed pipeline."""
    for stage in stages:
        ours, theirs = record(case, stage), record(whole, stage)
        assert ours["state"] == "done"
        assert ours["model_digest"] == theirs["model_digest"] and ours["results"] == theirs["results"], stage
    return "bit-exact"


@pytest.mark.parametrize("point", ["model.writing", "model.before_rename", "model.after_rename"])
def test_killed_while_a_stage_writes_its_model(point: str, begun: Case, whole: Case, row: Row) -> None:
    row.is_about(f"kill -9 at the end of a stage, {point}", END)
    row.ends(begun.start(faults=[begun.fault("kill_all", point)]).wait(), code=-9)
    row.recovers(begun, whole, reached=STEPS, at_most=0)
    assert record(begun, "pretrain")["state"] == "done"


def test_killed_between_two_stages(begun: Case, whole: Case, row: Row) -> None:
    row.is_about("kill -9 of everything between pre-training and head swap", BETWEEN)
    fault = begun.fault("kill_all", "record.writing", path="swap_head")
    row.ends(begun.start(how="run", faults=[fault]).wait(), code=-9)
    assert record(begun, "pretrain")["state"] == "done" and not (begun.run / "swap_head" / "model").exists()
    continued = begun.start(how="run").wait()
    assert continued.code == 0 and "pretrain: done already" in continued.output, continued.output
    row.lost = "0 steps"
    row.continued = same_results(begun, whole, "pretrain", "swap_head", "finetune")
    row.leaves_nothing(begun, whole, besides=("swap_head/ranks/",))  # the ranks that wait there have heartbeats, too


@pytest.mark.parametrize(
    ("point", "settings"),
    [
        ("swap_head", {}),
        ("model.writing", {}),
        ("model.before_rename", {}),
        ("model.after_rename", {}),
        ("record.writing", {"nth": 2}),  # where it would say that it is done
    ],
    ids=["arithmetic", "model.writing", "model.before_rename", "model.after_rename", "record.writing"],
)
def test_killed_in_the_head_swap(
    point: str, settings: dict[str, int], pretrained: Case, whole: Case, row: Row, request: pytest.FixtureRequest
) -> None:
    row.is_about(f"kill -9 in the head swap, {request.node.callspec.id}", SWAP)
    fault = pretrained.fault("kill_all", point, **settings)
    row.ends(pretrained.start(stage="swap_head", processes=1, faults=[fault]).wait(), code=-9)
    assert record(pretrained, "swap_head")["state"] == "running" if point != "swap_head" else True
    continued = pretrained.start(stage="swap_head", processes=1).wait()
    assert continued.code == 0, continued.output
    row.has_no("lost")
    row.continued = same_results(pretrained, whole, "swap_head")
    row.leaves_nothing(pretrained, whole)


@pytest.mark.parametrize(("form", "name"), [("npz", "export.npz"), ("timm", "export-timm")])
def test_killed_during_an_export(form: str, name: str, pretrained: Case, whole: Case, row: Row) -> None:
    row.is_about(f"kill -9 during an export to {form}", EXPORT)
    command = ("export", str(whole.run), "--format", form, "--out")
    out = pretrained.folder / name
    fault = pretrained.fault("kill", "export.writing")
    row.ends(pretrained.shardvit(*command, str(out), faults=[fault]), code=-9)
    assert not out.exists()
    again = pretrained.shardvit(*command, str(out))
    assert again.code == 0, again.output
    expected = pretrained.folder / "expected" / name
    expected.parent.mkdir()
    assert pretrained.shardvit(*command, str(expected)).code == 0
    left = [path.name for path in pretrained.folder.iterdir() if "export" in path.name and path.suffix != ".json"]
    assert left == [name]
    row.has_the_same_bytes(contents(out), contents(expected))


def test_killed_while_packing(case: Case, shards: Path, row: Row) -> None:
    row.is_about("kill -9 during pack", PACK)
    fault = case.fault("kill", "pack.shard", nth=3)
    row.ends(case.pack_digits(faults=[fault]), code=-9)
    out = case.folder / "packed/digits"
    assert not out.exists()
    again = case.pack_digits()
    assert again.code == 0, again.output
    assert list(out.parent.iterdir()) == [out]
    row.has_the_same_bytes(contents(out), contents(shards))


def contents(path: Path) -> dict[str, str]:
    """Digest of a file, or of every file in a folder, by name; without the record of how long packing took."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
