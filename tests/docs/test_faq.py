"""The commands of docs/faq.md, given as the page gives them, still say what it says they do."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
# (command, the parts of its output that the page shows)
SHOWN = [
    (command, [line for line in said.splitlines() if line])
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.S | re.M)
    for command, said in re.findall(r"^\$ shardvit ([^\n]+)\n((?:[^$\n][^\n]*\n)*)", block, re.M)
]
# Parts of messages that the page shows without a command, as they cost too much to provoke; each stands in one line.
QUOTED = (
    "stopped and saved",
    "wait for it, or stop it first",
    "is in use by",
    "out of memory: a micro-batch of",
    "the disk is full: make room there, and the same command resumes",
    "only the checkpoint is kept",
    "is retried, and metrics.jsonl has every value",
    "were not sent: `shardvit sync",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_preloaded: Callable[..., CompletedProcess[str]]) -> Path:
    """The page's recipe, its shards and a run of it, and what the examples are mistaken about."""
    folder = tmp_path_factory.mktemp("faq")
    (folder / "my.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[0])
    for name in ("photos/0.png", "photos/1.png", "photos/2.png", "photos/3.png", "broken/a/0.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), len(name), np.uint8)).save(folder / name)
    (folder / "broken" / "b").mkdir()
    (folder / "broken" / "b" / "notes.jpg").write_text("no image")
    (folder / "empty").mkdir()
    (folder / "mine.py").write_text("def smooth(logits, targets): ...")
    for command in (
        "pack digits shards --holdout 0.2",
        "pack digits other --holdout 0.2 --classes 0,1,2",
        "run my.yaml --runs begun",
    ):
        done = run_preloaded(*command.split(), cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_page_shows_many() -> None:
    assert len(SHOWN) > 20
    assert all(said for _, said in SHOWN)


@pytest.mark.parametrize("part", QUOTED)
def test_what_is_shown_without_a_command_is_still_said(part: str) -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for top in ("launch", "pipeline") for path in (ROOT / top).rglob("*.py")
    )
    assert part in PAGE and part in sources


@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[command.replace("/", ":") for command, _ in SHOWN])
def test_a_mistake_has_its_message(
    folder: Path, run_preloaded: Callable[..., CompletedProcess[str]], command: str, said: list[str]
) -> None:
    shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "runs").mkdir()
    if any("runs/small was started" in line for line in said):
        shutil.copytree(folder / "begun" / "small", folder / "runs" / "small")
    done = run_preloaded(*command.split(), cwd=folder, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    for line in said:
        assert line.replace("shardvit: .../", f"shardvit: {folder}/") in done.stderr
