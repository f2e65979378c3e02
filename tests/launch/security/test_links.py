"""A run from elsewhere whose files are links to another run's: nothing of that one is shown. No FIFO is waited for."""

import base64
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from shardvit.data_shards.durable import break_links
from shardvit.launch.slurm.records import Submission, write_submission
from shardvit.pipeline.ranks.heartbeat import Heartbeat, write_heartbeat
from shardvit.pipeline.runs.evaluations import load_evaluation, save_evaluation
from shardvit.pipeline.runs.pictures import Picture, keep_table
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.transfer.results import load_record, save_record
from tests.launch.conftest import Call
from tests.launch.report.runs import make_run

pytestmark = pytest.mark.filterwarnings("ignore")
SECRET = "Geheimnis"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make_run(root / "runs", "theirs", points=16)
    make_run(root / "runs", "beside", points=8)
    make_run(root / "mine", "theirs", points=16, words=SECRET, overrides=("seed=424242",))
    mine = root / "mine/theirs"
    kept = mine / "pretrain/evaluations/val/step-00000800"
    result = load_evaluation(kept)
    save_evaluation(kept.parents[2], replace(result, metrics={**result.metrics, f"val/{SECRET}": 0.5}), step=800)
    known = load_record(mine / "transfer/pets.json")
    save_record(mine / "transfer/pets.json", replace(known, results=(replace(known.results[0], data_set=SECRET),)))
    for number, png in enumerate(sorted(mine.rglob("step-*.png"))):  # no other run has such
        Image.effect_noise((60 + number, 40), 80).save(png)
        png.with_suffix(".svg").write_text(f"<!-- {SECRET} {number} -->{png.with_suffix('.svg').read_text()}")
    for place in ("runs", "mine"):
        folder = RunFolder(root / place, "theirs")
        folder.note_difference(f"seed: 0 -> {SECRET if place == 'mine' else 1}\n")
        (folder.path / "slurm").mkdir()
        (folder.path / "slurm/finetune.log").write_text(f"{SECRET if place == 'mine' else 'log'}\n")
        reason = SECRET if place == "mine" else "none"
        write_submission(folder.path / "slurm", Submission(0, 1, 1, 0, {"finetune": reason}))
    return root


@pytest.fixture
def theirs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "top")
    monkeypatch.chdir(tmp_path / "top")
    return tmp_path / "top/runs/theirs"


def link(theirs: Path, name: str) -> None:
    """In place of a file or folder of the run there is a link to mine."""
    path = theirs / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(Path("../../mine/theirs" if "/" not in name else theirs.parents[1] / "mine/theirs") / name)


FOLDERS = (
    "pretrain",
    "pretrain/pictures",
    "pretrain/pictures/data_picture",
    "pretrain/evaluations",
    "pretrain/evaluations/val",
    "pretrain/evaluations/val/step-00000800",
    "transfer",
    "slurm",
)


def shown(theirs: Path, call: Call) -> str:
    """All that the readers say of the run, without the words that name the links."""
    said = []
    for command in (
        ("report", theirs, "--no-draw"),
        ("compare", theirs.parent / "beside", theirs, "--no-draw", "--output", "compared.html"),
        ("watch", theirs, "--once"),
        ("status", theirs),
    ):
        _, out, err = call(*command)
        assert "Traceback" not in out + err
        said += [out, err]
    pages = [page.read_text() for page in (theirs / "report.html", Path("compared.html")) if page.exists()]
    return "\n".join([*said, *pages])


@pytest.fixture
def impatient() -> Iterator[None]:
    """What waits for a FIFO fails, whatever else is slow."""

    def wake(*_: object) -> None:
        raise AssertionError("a FIFO is waited for")

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pictures_of(run: Path) -> list[str]:
    return [base64.b64encode(path.read_bytes()).decode() for path in run.rglob("step-*.[ps][nv]g")]


def test_what_is_looked_for_stands_in_the_page_of_my_run(theirs: Path, call: Call) -> None:
    mine = theirs.parents[1] / "mine/theirs"
    code, _, err = call("report", mine, "--no-draw")
    page = (mine / "report.html").read_text()
    assert code == 0 and SECRET in page and "424242" in page, err
    assert any(picture in page for picture in pictures_of(mine))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_a_link_out_is_not_followed(theirs: Path, name: str, call: Call) -> None:
    link(theirs, name)
    said = shown(theirs, call)
    assert SECRET not in said
    assert not any(picture in said for picture in pictures_of(theirs.parents[1] / "mine"))


@pytest.mark.parametrize("which", ["*.*", "*.[ps][nv]g", "*.jsonl"])
def test_a_file_that_is_a_link_out_is_not_followed(theirs: Path, which: str, call: Call) -> None:
    names = [str(path.relative_to(theirs)) for path in theirs.rglob(which) if path.is_file()]
    assert names
    for name in names:
        link(theirs, name)
    said = shown(theirs, call)
    assert SECRET not in said and "424242" not in said
    assert not any(picture in said for picture in pictures_of(theirs.parents[1] / "mine"))


@pytest.mark.parametrize("which", ["recipe.yaml", "stage.json", "*"])
@pytest.mark.usefixtures("impatient")
def test_a_fifo_stops_nobody(theirs: Path, which: str, call: Call) -> None:
    beat = Heartbeat(0, "1", "here", "x", 1, 0.0, 1, 1, 400, 1, "", 0.0, False)
    (theirs / "pretrain/ranks").mkdir()
    write_heartbeat(theirs / "pretrain/ranks", beat)
    files = [path for path in theirs.rglob(which) if path.is_file() and (which != "*" or path.parent != theirs)]
    assert files
    for path in files:
        path.unlink()
        os.mkfifo(path)
    shown(theirs, call)


def test_nothing_is_drawn_or_written_through_a_link(theirs: Path) -> None:
    mine = theirs.parents[1] / "mine/theirs"
    before = sorted(mine.rglob("*"))
    link(theirs, "pretrain/pictures")
    with pytest.raises(OSError, match="link leads out"):
        keep_table(theirs / "pretrain", Picture("new", "", "", "", "data"), columns={"a": [1]}, step=1)
    link(theirs, "pretrain/events.jsonl")
    with pytest.raises(OSError, match="symbolic link"):
        break_links(theirs / "pretrain/events.jsonl")
    assert sorted(mine.rglob("*")) == before
