"""A malicious file of every kind for every command that reads one: no code runs, and what is refused is a sentence."""

import contextlib
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import shardvit
from shardvit.data_shards.store.store import Store
from shardvit.launch.run import pipeline_run
from tests.launch.conftest import Call
from tests.launch.security.attacks import ROWS, Outcome
from tests.launch.security.on_records import own_code, pipe, tagged_recipe
from tests.launch.security.on_shards import postscript
from tests.launch.security.somebody import Attack, World, make_world

pytestmark = pytest.mark.filterwarnings("ignore")  # of cyclopts, and of what was tampered with

ARGUMENTS: dict[str, Callable[[World], list[object]]] = {
    "predict": lambda world: ["predict", world.model, world.image, "--device", "cpu"],
    "export": lambda world: ["export", world.model, "--format", "npz", "--out", world.top / "out.npz"],
    "eval": lambda world: ["eval", world.model, world.shards, "--device", "cpu", "--no-tracking"],
    "transfer": lambda world: [
        *("transfer", world.model, world.shards, world.shards, "--method", "knn", "--device", "cpu", "--no-tracking"),
        *("--features", world.top / "features"),
    ],
    "figures": lambda world: ["figures", world.model, "--output", world.top / "figures"],
    "import": lambda world: ["import", world.model, world.top / "imported"],
    "status": lambda world: ["status", world.run],
    "report": lambda world: ["report", world.run],
    "watch": lambda world: ["watch", world.run, "--once"],
    "run": lambda world: ["run", world.recipe, "--runs", world.run.parent],
    "run --dry-run": lambda world: ["run", world.recipe, "--runs", world.run.parent, "--dry-run"],
    "submit --render": lambda world: [
        *("submit", world.recipe, "--runs", world.run.parent, "--render"),
        *("--nodes", 1, "--tasks-per-node", 1, "--time", "1:00:00"),
    ],
    "plan": lambda world: ["plan", world.recipe],
    "check": lambda world: ["check", world.shards, "--decode"],
    "pack": lambda world: ["pack", world.source, world.top / "packed", *world.pack_options],
}
CASES = [
    pytest.param(command, row.outcome, attack, id=f"{command}-{attack.__name__}")
    for row in ROWS
    for command in row.commands
    if command not in row.elsewhere
    for attack in row.attacks
]


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("somebody") / "world"
    top.mkdir()
    with contextlib.chdir(top):
        make_world(top)
    return top


@pytest.fixture
def world(harmless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy to tamper with; nothing can be started."""
    top = tmp_path / "world"
    shutil.copytree(harmless, top)
    monkeypatch.chdir(top)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{top / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(pipeline_run, "run_stage_locally", lambda launch: pytest.fail("a stage was started"))
    return World(top)


@pytest.mark.parametrize("command", [command for command in ARGUMENTS if command not in ("run", "import", "pack")])
def test_what_was_not_tampered_with_is_read(world: World, command: str, call: Call) -> None:
    code, out, err = call(*ARGUMENTS[command](world))
    assert (code, out != "") == (0, True), err


@pytest.mark.parametrize(("command", "outcome", "attack"), CASES)
def test_no_code_of_a_file_runs(world: World, command: str, outcome: Outcome, attack: Attack, call: Call) -> None:
    attack(world)
    assert not world.canary.exists()
    code, out, err = looked_at(world) if command == "load_run" else call(*ARGUMENTS[command](world))
    assert not world.canary.exists() and not (world.top.parent / "canary").exists()
    assert "Traceback" not in out + err
    assert not set(map(chr, range(32))) - {"\n"} & set(out + err)
    match outcome:
        case "refused":
            assert code in (1, 2) and out + err, out + err
        case "not run, and said":
            said = " ".join((out + err).split())
            words = ("is a command", "may start programs", "does not lie inside")
            assert code == 0 and any(each in said for each in words), said
        case "not read":
            assert code == 0, out + err
        case "read as data":
            assert code in (0, 1, 2), out + err


def looked_at(world: World) -> tuple[int, str, str]:
    """As `call`, of everything that `shardvit.load_run` shows."""
    run, shown, refused = shardvit.load_run(world.run), list[str](), list[str]()
    looks: dict[str, Callable[[], object]] = {
        **{name: partial(getattr, run, name) for name in ("name", "path", "stages", "recipe", "evaluations", "notes")},
        **{"metrics": run.metrics, "predict": lambda: run.model("pretrain").predict(world.image)},
    }
    for look in looks.values():
        try:
            shown.append(str(look()))
        except ValueError as error:  # UserError is one
            refused.append(str(error))
    return int(bool(refused)), "\n".join(shown), "\n".join(refused)


def test_looking_in_python_shows_a_whole_run(world: World) -> None:
    code, out, err = looked_at(world)
    assert (code, err) == (0, "") and "theirs" in out and "ClassShare" in out


def test_the_canary_dies_where_code_does_run(world: World) -> None:
    """The control: each of the means works on a reader that obeys files."""

    def dies(read: Callable[[], object]) -> bool:
        assert not world.canary.exists()
        with contextlib.suppress(Exception):
            read()
        died = world.canary.exists()
        shutil.rmtree(world.canary, ignore_errors=True)
        return died

    import yaml
    from PIL import Image

    file = world.new("x.pt")
    torch.save({"a": world.ran}, file)
    np.savez(world.new("x.npz"), a=np.array([world.ran], dtype=object))
    tagged_recipe(world)
    assert dies(lambda: pickle.loads(pickle.dumps(world.ran)))
    assert dies(lambda: torch.load(file, weights_only=False))
    assert dies(lambda: np.load(world.top / "x.npz", allow_pickle=True)["a"])
    assert dies(lambda: yaml.unsafe_load(world.recipe.read_text()))
    assert dies(lambda: Store(commands="run").read_small(world.pipe, most_bytes=10))
    assert dies(lambda: Image.open(postscript(world)).load())


def test_a_dry_run_names_own_code(world: World, call: Call) -> None:
    own_code(world)
    world.run.rename(world.top / "aside")  # what it recorded is another text
    code, out, err = call(*ARGUMENTS["run --dry-run"](world))
    assert code == 0 and f"runs own code {world.top / 'mine.py'}" in out, out + err
    assert not world.canary.exists()


def test_the_users_own_command_is_run_to_train(world: World, call: Call) -> None:
    pipe(world)
    world.run.rename(world.top / "aside")
    code, _, err = call(*ARGUMENTS["run"](world))
    assert world.canary.exists()
    assert code == 2, err  # mkdir's output is no tar
