"""Killed before any operation on the disk: a model folder, a stage's record and a restart are whole or as before."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, load_model, save_model
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.run_folder import RunFolder

# What CPython tells its audit hooks; a write inside safetensors is one operation, which ends before the next.
WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate", "os.listdir"}


def killed_everywhere(
    top: Path, *, prepare: Callable[[Path], None], work: Callable[[Path], None], look: Callable[[Path], str]
) -> list[str]:
    """What `look` says after `work` was killed before its first, second, ... operation on the disk, and at last not.

    Each time in a fresh folder, which must be whole again after `work` is done once more.
    """
    seen: list[str] = []
    for moment in range(500):
        folder = top / f"{moment:03d}"
        folder.mkdir()
        prepare(folder)
        child = os.fork()
        if child == 0:
            _die_at(moment, folder=folder, work=work)
        status = os.waitpid(child, 0)[1]
        seen.append(look(folder))
        work(folder)
        assert look(folder) == "new"
        assert not [path for path in folder.rglob("*") if path.name.endswith((".writing", ".replaced"))]
        shutil.rmtree(folder)
        if not os.WIFSIGNALED(status):
            assert status == 0 and seen[-1] == "new"
            return seen
    raise AssertionError("it never ends")


def _die_at(moment: int, *, folder: Path, work: Callable[[Path], None]) -> None:
    count = 0

    def hook(event: str, arguments: object) -> None:
        nonlocal count
        if event in WRITING:
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)
    try:
        work(folder)
    except BaseException:  # noqa: BLE001 - a child must never come back into the tests
        os._exit(1)
    os._exit(0)


META = SavedModelMeta(
    model=ModelConfig(width=16, depth=1, heads=2, mlp_dim=16, patch_size=4),
    image_size=8,
    num_classes=2,
    class_names=("a", "b"),
    head="linear",
)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(tensor) for name, tensor in build_described(META).state_dict().items()}


def bias_of(folder: Path) -> str:
    if not (folder / "model").exists():
        return "absent"
    value = float(load_model(folder / "model")[1]["head.bias"][0])
    return {1.0: "old", 2.0: "new"}[value]


@pytest.mark.parametrize("before", ["absent", "old"])
def test_a_model_folder_is_whole_or_absent(tmp_path: Path, weights: dict[str, torch.Tensor], before: str):
    def save(folder: Path, value: float) -> None:
        save_model(folder / "model", {**weights, "head.bias": torch.full((2,), value)}, meta=META)

    seen = killed_everywhere(
        tmp_path,
        prepare=lambda folder: save(folder, 1.0) if before == "old" else None,
        work=lambda folder: save(folder, 2.0),
        look=bias_of,
    )
    order = [before, *(["absent"] if before == "old" else []), "new"]
    assert list(dict.fromkeys(seen)) == order  # and never back
    assert seen.count("absent") <= 1 or before == "absent"


def test_an_earlier_model_is_not_lost_by_two_failures_in_a_row(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    """The first one killed between the two renames, the second on a full disk."""
    save_model(tmp_path / "model", {**weights, "head.bias": torch.full((2,), 1.0)}, meta=META)
    (tmp_path / "model").rename(tmp_path / ".model.replaced")

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_model(tmp_path / "model", weights, meta=META)
    assert bias_of(tmp_path) == "old" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_a_systems_error_that_names_the_file(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    """safetensors has an exception of its own for it; this is its text."""
    from safetensors import SafetensorError

    def full(*arguments: object, **more: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_model(tmp_path / "model", weights, meta=META)
    assert caught.value.errno == 28 and str(caught.value.filename).endswith("model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_the_new_or_the_old_one(tmp_path: Path):
    def record(folder: Path) -> str:
        return {0: "none", 100: "old", 200: "new"}[RunFolder(folder, "a").record("pretrain").last_saved_step]

    def begun(folder: Path) -> None:
        RunFolder(folder, "a").path.mkdir()
        RunFolder(folder, "a").update("pretrain", last_saved_step=100)

    seen = killed_everywhere(
        tmp_path,
        prepare=begun,
        work=lambda folder: RunFolder(folder, "a").update("pretrain", last_saved_step=200) and None,
        look=record,
    )
    assert list(dict.fromkeys(seen)) == ["old", "new"]


def test_a_restart_never_leaves_a_stage_that_was_made_from_one_that_is_gone(tmp_path: Path):
    recipe = load_recipe("digits")
    changed = load_recipe("digits", overrides=["stages.pretrain.optimizer.lr=0.5"])
    stages = ("pretrain", "swap_head", "finetune")

    def prepare(folder: Path) -> None:
        RunFolder(folder, "digits").open(recipe)
        for stage in stages:
            RunFolder(folder, "digits").update(stage, state="done", model_digest=stage)

    def work(folder: Path) -> None:
        run = RunFolder(folder, "digits")
        run.check_recipe(changed, restart="pretrain")
        run.open(changed, restart="pretrain")

    def look(folder: Path) -> str:
        run = RunFolder(folder, "digits")
        done = [run.record(stage).state == "done" for stage in stages]
        assert done == sorted(done, reverse=True), done
        kept = sorted(json.loads(path.read_text())["model_digest"] for path in folder.rglob("stage.json"))
        assert kept == sorted(stages)  # nothing is deleted
        if any(done):
            return "old" if all(done) else "between"
        return "new" if "lr: 0.5" in (run.path / "recipe.yaml").read_text() else "between"

    seen = killed_everywhere(tmp_path, prepare=prepare, work=work, look=look)
    assert list(dict.fromkeys(seen)) == ["old", "between", "new"]
