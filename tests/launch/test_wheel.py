"""What `python -m build` makes: one package with all that it needs, which runs where there is no clone."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from shardvit.pipeline.runs.written_by import COMMIT_FILE, source_revision
from tests.launch.test_working_folder import RECIPE
from tests.test_repository import FILES, PROJECT, ROOT
from tests.traps import lay_traps

ROOMS = ("data_shards", "launch", "model", "pipeline")
LEFT_OUT = (
    "launch/bench/README.md",
    "model/README.md",
    "launch/bench/records/",
    "launch/containers/",
    "launch/kubernetes/",
    "launch/skypilot/",
)  # read by people
ADDED = ("py.typed", COMMIT_FILE)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and of the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def expected() -> set[str]:
    names = [str(path.relative_to(ROOT)) for path in FILES]
    rooms = {name for name in names if name.split("/")[0] in ROOMS and not name.startswith(LEFT_OUT)}
    return {f"shardvit/{name}" for name in (*rooms, *ADDED)} | {name for name in names if name.startswith("shardvit/")}


def test_the_wheel_holds_one_package_and_every_file_of_it(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = f"shardvit-{PROJECT['version']}.dist-info"
        names = {name for name in archive.namelist() if not name.startswith(f"{info}/")}
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        assert json.loads(archive.read(f"shardvit/{COMMIT_FILE}")) == source_revision()
    assert names == expected()
    assert entry_points.split("\n")[:2] == ["[console_scripts]", "shardvit = shardvit.launch.cli:main"]
    assert "Do Not Upload" not in metadata and "License-Expression: Apache-2.0" in metadata


def test_the_sdist_holds_the_same_and_no_test(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    top = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"}
    assert {name for name in names if "egg-info" not in name} - {"PKG-INFO", "setup.cfg"} == top | {
        f"src/{name}" for name in expected()
    }


def test_it_runs_in_somebodys_own_repository_without_the_clone(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    installed, folder = tmp_path / "installed", tmp_path / "repository"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run([*pip, "--target", str(installed), str(wheel)], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    sprung = lay_traps(folder)
    (folder / "my.yaml").write_text(RECIPE.replace("processes: 2", "processes: 1").replace("process}", "thread}"))

    def call(*words: str) -> str:
        done = subprocess.run(
            [str(installed / "bin" / "shardvit"), *words],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(installed)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode, sprung()) == (0, []), done.stdout + done.stderr
        return done.stdout

    commit = source_revision().get("mlflow.source.git.commit", "unknown")
    assert call("--version").startswith(f"{PROJECT['version']} (commit {commit}")
    assert "vit_l16_in21k" in call("recipes") and "stages:" in call("recipes", "digits")
    assert "H200" in call("plan", "vit_b16_in21k", "--gpus", "8", "--gpu", "h200").upper()
    call("pack", "digits", "shards", "--holdout", "0.2", "--classes", "0,1")
    call("run", "my.yaml")
    state = next((folder / "runs" / "small" / "pretrain" / "checkpoints").rglob("state.json"))
    assert json.loads(state.read_text())["written_by"]["revision"].startswith(commit)
    call("report", "runs/small")  # its templates
    assert (folder / "runs" / "small" / "report.html").stat().st_size > 10_000
