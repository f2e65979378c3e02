"""`shardvit push` to a hub on loopback, loaded back by timm; shards from `hf://`, trained on; no token anywhere."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import yaml

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.launch.cli import app
from shardvit.model.saved.model_folder import build_from_saved
from tests.hub import TOKEN, environment, find_hub, serving
from tests.small_recipe import small_recipe, small_stage, write_recipe

# the client's own, of the HTTP library that it uploads with
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: object) -> int:
    return app(list(map(str, arguments)), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, run_preloaded: RunCli) -> Path:
    """A run on shards that were packed, put on the hub as a data set, and read from there with the real client."""
    folder = tmp_path_factory.mktemp("push")
    pack("digits", folder / "digits", holdout=0.2, report=lambda line: None)
    with serving() as hub:
        hub.add_folder("me/digits", folder / "digits", kind="datasets").access = "private"
        train, held_out = (f"hf://datasets/me/digits/{split}" for split in ("train", "val"))
        stage = small_stage(duration="4 steps", eval_every="2 steps", save_every="2 steps") | {"train": train}
        stage |= {"eval": held_out, "head": "linear"}
        write_recipe(folder / "r.yaml", small_recipe(pretrain_=stage, data={"cache": {"folder": str(folder / "c")}}))
        found = run_preloaded("run", "r.yaml", cwd=folder, env=environment(hub, folder, token=TOKEN))
        assert found.returncode == 0, found.stderr
        assert any("/datasets/me/digits/resolve" in path for _, path, _ in hub.requests)
    assert TOKEN not in found.stdout + found.stderr
    return folder / "runs" / "r"


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_the_token_is_nowhere_in_the_run_nor_in_mlflow(run: Path) -> None:
    assert (run.parent / "mlflow.db").is_file()
    assert TOKEN.encode() not in everything(run.parent)


def test_timm_loads_what_was_pushed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as hub:
        find_hub(hub, tmp_path, monkeypatch, token=TOKEN)
        arguments = ("push", run, "me/vit-digits", "--license", "apache-2.0", "--private")
        assert command(*arguments) == 0
        repository = hub.repositories["models/me/vit-digits"]
        assert repository.access == "private"
        assert len(repository.commits) == 2  # the hub's first, and ours
        assert {*repository.files} == {".gitattributes", "README.md", "config.json", "model.safetensors"}
        theirs = timm.create_model("hf-hub:me/vit-digits", pretrained=True, cache_dir=tmp_path / "timm").eval()
        _, ours = build_from_saved(run / "pretrain" / "model")
        images = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(theirs(images), ours.eval()(images), rtol=0, atol=1e-6)
        assert command("import", "hf-hub:me/vit-digits", tmp_path / "again") == 0
        card = repository.files["README.md"].decode()
        assert command(*arguments) == 0  # nothing has changed
    header = yaml.safe_load(card.split("---\n")[1])
    assert (header["license"], header["library_name"]) == ("apache-2.0", "timm")
    (top1,) = (each["value"] for each in header["model-index"][0]["results"][0]["metrics"])
    assert top1 == json.loads((run / "pretrain" / "stage.json").read_text())["results"]["val/top1"]
    for part in ('timm.create_model("hf-hub:me/vit-digits"', "hf://datasets/me/digits/train", "lr: 0.003", "val/top1"):
        assert part in card
    assert TOKEN not in card
    assert str(run.parent.parent) not in card


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as hub:
        find_hub(hub, tmp_path, monkeypatch)
        output = tmp_path / "sent"
        checkpoint = run / "pretrain" / "checkpoints" / "step-00000004"
        assert command("push", checkpoint, "me/x", "--license", "mit", "--dry-run", "--output", output) == 0
        assert hub.requests == []
    assert {path.name for path in output.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_secrets_of_a_run_do_not_reach_its_card(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardvit.launch.evaluation.model_card import _public

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    tree = {
        "a": ["https://u:p4ss@h/x.tar?sig=s3cret", "pipe:curl -H t0ken https://h/x.tar"],
        "b": "/data/mine/data/train",
    }
    shown = str(_public(tree))
    assert not any(secret in shown for secret in ("p4ss", "s3cret", "t0ken", "/data/mine"))
    assert "h/x.tar" in shown


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["me/x"], "--license"),
        (["me", "--license", "mit"], "OWNER/NAME"),
        (["me/x", "--license", "mit"], "log in"),
        (["me/x", "--license", "mit", "--output", "f"], "--dry-run"),
    ],
)
def test_mistakes(more: list[str], reason: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as hub:
        find_hub(hub, tmp_path, monkeypatch)
        with pytest.raises(UserError, match=reason):
            command("push", run, *more)
        hub.writable = False
        find_hub(hub, tmp_path, monkeypatch, token=TOKEN)
        with pytest.raises(UserError, match="refused"):
            command("push", run, "other/x", "--license", "mit")
