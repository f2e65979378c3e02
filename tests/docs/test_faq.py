"""The commands of docs/faq.md, given as the page gives them, still say what it says they do."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    (folder / "runs").mkdir()
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


@contextmanager
def renamed(path: Path, to: Path) -> Iterator[None]:
    path.rename(to)
    yield
    to.rename(path)


@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[command.replace("/", ":") for command, _ in SHOWN])
def test_a_mistake_has_its_message(
    folder: Path, run_preloaded: Callable[..., CompletedProcess[str]], command: str, said: list[str]
) -> None:
    begun = any("runs/small was started" in line for line in said)
    with renamed(folder / "begun" / "small", folder / "runs" / "small") if begun else nullcontext():
        done = run_preloaded(*command.split(), cwd=folder, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    for line in said:
        assert line in done.stderr
