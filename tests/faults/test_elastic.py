"""Another number of processes, another ZeRO stage, other library versions, another recipe, and what resumes."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.data_shards.small_set import touch_up
from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import Case
from tests.faults.rows import Row

ELASTIC = (
    "The same command continues with another number of processes or another ZeRO stage by itself: same images, weights "
    "and optimizer, losses equal but for rounding."
)
DATA = (
    "Data that changed since a stage began, even only two images in a tar of the same size and time, are refused in "
    "one sentence that names the shard; with the old data, or a copy, the run continues."
)
RECIPE = "A changed recipe is refused in one sentence that shows the difference; with the old one the run continues."
VERSIONS = "Other library versions than those that wrote the checkpoint are named, and the run continues."

# In float32, where sums differ in the last digits; dropout is on.
CHANGES = {"engine.precision": "fp32", "stages.pretrain.global_batch_size": 24}
TOLERANCE = 1e-4  # of any loss, gradient norm or weight at the end of 60 steps; seen: 2.5e-5
KILLED_AT = 26


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[tuple[int, int], Case]:
    """Runs of so many processes at such a ZeRO stage that were killed after `KILLED_AT` steps, made when asked for."""

    class Killed(dict[tuple[int, int], Case]):
        def __missing__(self, key: tuple[int, int]) -> Case:
            processes, stage = key
            case = Case(
                tmp_path_factory.mktemp("killed") / "case",
                shards,
                changes={**CHANGES, "processes": processes, "engine.zero_stage": stage},
            )
            case.run_until_killed(step=KILLED_AT)
            assert case.saved()[-1] == 20
            self[key] = case
            return case

    return Killed()


@pytest.mark.parametrize(
    ("before", "now"),
    [((2, 2), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (3, 2)), ((2, 2), (2, 3)), ((2, 3), (2, 1)), ((2, 3), (3, 0))],
    ids=lambda layout: f"{layout[0]} processes, ZeRO {layout[1]}",
)
def test_another_layout(
    before: tuple[int, int],
    now: tuple[int, int],
    killed: dict[tuple[int, int], Case],
    new_case: NewCase,
    undisturbed: Undisturbed,
    row: Row,
) -> None:
    row.is_about(f"{before[0]} processes, ZeRO {before[1]} -> {now[0]} processes, ZeRO {now[1]}", ELASTIC)
    baseline = undisturbed(changes=CHANGES)
    case = new_case(changes={**CHANGES, "processes": now[0], "engine.zero_stage": now[1]})
    shutil.copytree(killed[before].run, case.run)
    ended = case.start().wait()
    row.ends(ended, code=0, says="changed since")
    # Another layout has other shards and other ranks, the killed ones' stacks among them.
    besides = ["/deepspeed/", "/ddp.pt", "pretrain/ranks/"]
    row.recovers(case, baseline, ended, reached=KILLED_AT, tolerance=TOLERANCE, besides=besides)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Case:
    """The suite's recipe, killed; to be copied."""
    case = Case(tmp_path_factory.mktemp("plain") / "case", shards)
    case.run_until_killed(step=KILLED_AT)
    return case


def test_a_changed_recipe(plain: Case, case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("recipe changed", RECIPE)
    baseline = undisturbed()
    shutil.copytree(plain.run, case.run)
    refused = case.start("stages.pretrain.optimizer.lr=0.5", how="run").wait()
    row.ends(refused, code=2, says="the recipe differs")
    assert "stages.pretrain.optimizer.lr: 0.003 -> 0.5" in refused.output
    assert case.start("stages.pretrain.optimizer.lr=0.5").wait().code == 2  # the ranks look for themselves
    row.recovers(case, baseline, reached=KILLED_AT)


def test_changed_data(plain: Case, case: Case, undisturbed: Undisturbed, row: Row, shards: Path) -> None:
    row.is_about("a shard changed", DATA)
    baseline = undisturbed()
    shutil.copytree(plain.run, case.run)
    tar = sorted((shards / "train").glob("*.tar"))[0]
    touch_up(tar)
    try:
        refused = case.start(how="run").wait()
        row.ends(refused, code=2, says=tar.name)
        ranks = case.start().wait()  # they look for themselves
        assert ranks.code == 2 and tar.name in ranks.output
    finally:
        touch_up(tar)
    row.recovers(case, baseline, reached=KILLED_AT)


def test_other_library_versions(plain: Case, case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("written by other library versions", VERSIONS)
    baseline = undisturbed()
    shutil.copytree(plain.run, case.run)
    write_as_torch(case.stage / "checkpoints" / "step-00000020", version="2.11.0")
    ended = case.start().wait()
    row.ends(ended, code=0, says="torch 2.11.0 -> ")
    row.recovers(case, baseline, ended, reached=KILLED_AT)


def write_as_torch(folder: Path, *, version: str) -> None:
    """Let a checkpoint say that another torch has written it, its manifest included."""
    state, manifest = folder / "state.json", folder / "manifest.json"
    content = json.loads(state.read_text())
    content["written_by"]["torch"] = version
    state.write_text(json.dumps(content, indent=1))
    listed = json.loads(manifest.read_text())
    digest = hashlib.blake2b(state.read_bytes(), digest_size=16).hexdigest()
    listed["files"]["state.json"] = {"bytes": state.stat().st_size, "blake2b": digest}
    manifest.write_text(json.dumps(listed))
