"""Mistakes in paths, manifests and classes are said before torch is loaded: here its import ends the command."""

from pathlib import Path

import pytest

from shardvit.pipeline.runs.run_folder import RunFolder
from tests.conftest import ROOT, RunCli
from tests.pipeline.transfer.small_model import pack_digits, save_small

SETS = ("shards/train", "shards/val")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of four digits; a model, a run and an unfinished stage with other classes; a torch that cannot be had."""
    root = tmp_path_factory.mktemp("early")
    pack_digits(root / "shards")
    save_small(root / "model")
    run = RunFolder(root / "runs", "small")
    save_small(run.model("pretrain"))
    run.update("pretrain", state="done")
    (run.path / "recipe.yaml").write_text("name: small\n")
    begun = RunFolder(root / "runs", "begun")
    begun.checkpoints("pretrain").joinpath("step-00000004").mkdir(parents=True)
    begun.update("pretrain", state="running", model=_record(root / "model"))
    (begun.path / "recipe.yaml").write_text("name: begun\n")
    (root / "poison").mkdir()
    for name in ("torch", "timm"):
        (root / "poison" / f"{name}.py").write_text(f'raise SystemExit("{name} was imported")\n')
    (root / "table.yaml").write_text("data_sets: [{name: a, train: shards/train, eval: nowhere}]\n")
    return root


def _record(model: Path) -> dict[str, object]:
    from shardvit.model.saved.model_folder import read_meta

    return read_meta(model).model_dump(mode="json", exclude_none=True)


MISTAKES = {
    "eval, other classes": (("eval", "model", "shards/val"), "do not fit"),
    "eval, other classes, a run": (("eval", "runs/small", "shards/val"), "do not fit"),
    "eval, other classes, a checkpoint": (("eval", "runs/begun/pretrain", "shards/val"), "do not fit"),
    "eval, a run that is not done": (("eval", "runs/begun", "shards/val"), "runs/begun/pretrain"),
    "predict, no image": (("predict", "model", "no.jpg"), "no.jpg"),
    "transfer, no table": (("transfer", "model", "no.yaml"), "no.yaml"),
    "transfer, no shards": (("transfer", "model", "table.yaml"), "nowhere"),
    "probe, no shards": (("transfer", "model", "shards/train", "nowhere", "--method", "probe"), "nowhere"),
    "knn, no model": (("transfer", "nobody", *SETS, "--method", "knn"), "nobody"),
    "fewshot, a shot of 0": (("transfer", "model", *SETS, "--method", "fewshot", "--shots", "0"), "--shots"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_before_torch_is_loaded(mistake: str, work: Path, run_cli: RunCli) -> None:
    arguments, named = MISTAKES[mistake]
    path = f"{work / 'poison'}:{ROOT}"
    ended = run_cli(*arguments, cwd=work, env={"PYTHONPATH": path, "XDG_CACHE_HOME": str(work / "cache")})
    assert ended.returncode == 2 and named in ended.stderr, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [("transfer", "model", *SETS, "--method", "knn"), ("eval", "model", "shards/val"), ("run", "digits", "--dry-run")],
)
def test_an_address_that_mlflow_would_take_for_a_folder_is_refused(
    arguments: tuple[str, ...], work: Path, run_cli: RunCli
) -> None:
    env = {"PYTHONPATH": f"{work / 'poison'}:{ROOT}", "MLFLOW_TRACKING_URI": "http//nowhere"}
    ended = run_cli(*arguments, cwd=work, env=env)
    assert ended.returncode == 2 and "MLFLOW_TRACKING_URI is 'http//nowhere'" in ended.stderr, ended.stderr
    assert not (work / "http").exists()


def test_the_poison_works(work: Path, run_cli: RunCli) -> None:
    ended = run_cli(
        "transfer", "model", *SETS, "--method", "knn", cwd=work, env={"PYTHONPATH": f"{work / 'poison'}:{ROOT}"}
    )
    assert ended.returncode == 1 and "torch was imported" in ended.stderr
