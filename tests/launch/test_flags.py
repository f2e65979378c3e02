"""Every option that names an output file or folder: what the command did not write stays, and a run stays a run."""

import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import INDEX_FILE, demand_target, page_mark
from tests.launch.conftest import Call
from tests.launch.report.runs import make_run

pytestmark = pytest.mark.filterwarnings("ignore")
SETS = ("shards/train", "shards/val")
COMMANDS: dict[str, Callable[[object], Sequence[object]]] = {  # each with the place that it is to write to
    "report": lambda place: ("report", "runs/law", "--no-draw", "--output", place),
    "compare": lambda place: ("compare", "runs/law", "runs/other", "--no-draw", "--output", place),
    "eval --json": lambda place: ("eval", "runs/law", "shards", "--json", place),
    "eval --output": lambda place: ("eval", "runs/law", "shards", "--output", place),
    "knn": lambda place: ("transfer", "runs/law", *SETS, "--method", "knn", "--json", place),
    "transfer": lambda place: ("transfer", "runs/law", "table.yaml", "--json", place),
    "figures": lambda place: ("figures", "runs/law", "--output", place),
    "show": lambda place: ("show", "shards/train", "--output", place),
    "check": lambda place: ("check", "shards/train", "--against", "shards/val", "--output", place),
    "check --report": lambda place: ("check", "shards/train", "--against", "shards/val", "--report", place),
    "import": lambda place: ("import", "runs/law/pretrain", place),
    "export": lambda place: ("export", "runs/law", "--format", "timm", "--output", place),
    "export --out": lambda place: ("export", "runs/law", "--format", "timm", "--out", place),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("made")
    for name in ("law", "other"):
        make_run(top / "runs", name, points=4)
    (top / "table.yaml").write_text("name: t\ndata_sets: [{name: a, train: shards/train, eval: shards/val}]\n")
    (top / "somebody.txt").write_text("three years of work")
    (top / "somebody").mkdir()
    (top / "somebody/thesis.tex").write_text("three years of work")
    (top / "link").symlink_to("somebody.txt")
    (top / "linked").symlink_to("somebody")
    (top / "dangling").symlink_to("nowhere")
    (top / "stdout").symlink_to("/dev/stdout")
    os.mkfifo(top / "fifo")
    try:
        os.mknod(top / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # one of our own: the system's is not risked
    except PermissionError:  # not root
        os.mkfifo(top / "device")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(top / "socket"))
    return top


def contents(top: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(top.rglob("*"))}


IN_A_RUN = ("runs/law/recipe.yaml", "runs/law/new", "runs/law/pretrain/model", "runs/law/pretrain/metrics.jsonl")
NOT_FILES = ("link", "dangling", "stdout", "fifo", "socket", "device")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_to_nothing_that_is_not_its_own(
    made: Path, command: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    before = contents(made)
    folders = () if command in ("report", "compare") else ("linked", "somebody")  # these write report.html into one
    for place in (*IN_A_RUN, *NOT_FILES, "somebody.txt", *folders):
        for force in ((), ("--force",)):
            if force and place.startswith("somebody"):
                continue
            code, out, err = call(*COMMANDS[command](place), *force)
            assert (code, out) == (2, "") and place in err and "give another" in err, err
    assert contents(made) == before


def test_a_default_place_that_is_a_link_is_not_written_through(
    made: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs", "law", points=4)
    (run.path / "report.html").symlink_to(made / "somebody.txt")
    assert call("report", run.path, "--no-draw")[0] == 2
    assert (made / "somebody.txt").read_text() == "three years of work"


def test_what_the_same_command_wrote_is_replaced_and_with_force_anything(
    made: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    page, other = tmp_path / "page.html", tmp_path / "other.txt"
    other.write_text("old")
    for _ in range(2):
        assert call(*COMMANDS["report"](page))[0] == 0
    (tmp_path / "folder").mkdir()
    assert call(*COMMANDS["compare"](tmp_path / "folder"))[0] == 0  # both write such pages
    assert (tmp_path / "folder/report.html").read_text().endswith(page_mark("report"))
    assert call(*COMMANDS["report"](other), "--force")[0] == 0 and "<html" in other.read_text()
    with pytest.raises(UserError, match="--force"):  # a report is no page of show
        demand_target(page, flag="--output", force=False, mark=page_mark("show"), file=INDEX_FILE)


@pytest.mark.parametrize("folder", ["", "runs", "mine", "new/deeper"])
def test_places_that_are_no_runs_are_free(tmp_path: Path, folder: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.yaml").write_text("name: mine\n")  # of a user, beside whose results lie
    demand_target(tmp_path / folder / "x.json", flag="--json", force=False)


def test_the_pages_of_several_runs_lie_beside_them_and_compare_writes_one_on_request_alone(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / "runs", name, points=4)
    before = contents(tmp_path)
    code, out, _ = call("compare", "runs/a", "runs/b")
    assert code == 0 and "val/loss" in out and contents(tmp_path) == before
    code, _, err = call("compare", "runs/a", "runs/b", "--no-draw")
    assert code == 2 and "--output" in err
    assert call("report", "runs/a", "runs/b", "--no-draw")[1] == "report  runs/report.html\n"
