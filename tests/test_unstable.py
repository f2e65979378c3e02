"""`--once-more` on made-up tests, in processes of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# `first()` is true once for each name, whichever process asks; `say` prints who runs.
BEGIN = """
import os, pathlib, pytest
SEEN = pathlib.Path(__file__).parent / "seen"
def first(name):
    SEEN.mkdir(exist_ok=True)
    try:
        (SEEN / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
"""


class Session:
    """One `pytest --once-more` in a folder of made-up tests; `closing` is its last line without frame and time."""

    def __init__(self, folder: Path, test_file: str, *options: str, plugins: tuple[str, ...] = ()) -> None:
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
        (folder / "conftest.py").write_text('pytest_plugins = ["tests.unstable", "tests.side_by_side"]\n')
        (folder / "test_made_up.py").write_text(BEGIN + test_file)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        plugin_options = [option for plugin in plugins for option in ("-p", plugin)]
        around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugin_options, "--once-more", *options],
            cwd=folder,
            env={**around, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        self.code = done.returncode
        self.output = done.stdout + done.stderr
        self.closing = re.sub(r"^=* ?| in [0-9.]+s.*$", "", done.stdout.rstrip().splitlines()[-1])

    @property
    def block(self) -> str:
        """What stands between UNSTABLE and the closing line."""
        _, found, rest = self.output.partition(" UNSTABLE ")
        return rest if found else ""


def test_what_passes_the_second_time_fails_nothing_and_is_shown(tmp_path: Path) -> None:
    """It runs after all others, in another process."""
    session = Session(
        tmp_path,
        """
def note(name):
    with (pathlib.Path(__file__).parent / "order").open("a") as file:
        file.write(f"{name} {os.getpid()}\\n")
def test_shaky():
    note("shaky")
    print("process", os.getpid())
    assert not first("shaky"), "the reason " + "of the first failure"
def test_second():
    note("second")
""",
    )
    assert (session.code, session.closing) == (0, "1 passed, 1 unstable"), session.output
    names, pids = zip(*(line.split() for line in (tmp_path / "order").read_text().splitlines()), strict=True)
    assert names == ("shaky", "second", "shaky") and pids[0] == pids[1] != pids[2]
    assert "the reason of the first failure" in session.block and f"process {pids[0]}\n" in session.block
    assert "UNSTABLE test_made_up.py::test_shaky" in session.block
    assert re.search(r"1 unstable\b", session.block) and "FAILED" not in session.output


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    session = Session(
        tmp_path,
        """
def test_bad():
    assert False, "first" if first("bad") else "second"
def test_shaky():
    assert not first("shaky")
def test_good():
    pass
""",
    )
    assert session.code == 1
    assert session.closing == "1 failed, 1 passed, 1 unstable"
    assert "UNSTABLE test_made_up.py::test_shaky" in session.block
    assert "UNSTABLE test_made_up.py::test_bad" not in session.output
    assert re.search(r"^FAILED test_made_up.py::test_bad", session.output, re.MULTILINE)
    assert "AssertionError: first" in session.output and "AssertionError: second" in session.output  # both outputs


@pytest.mark.parametrize(("number", "code", "runs"), [(3, 0, 6), (4, 1, 4)])
def test_more_than_three_fail_the_run(tmp_path: Path, number: int, code: int, runs: int) -> None:
    session = Session(
        tmp_path,
        f"""
@pytest.mark.parametrize("number", range({number}))
def test_shaky(number):
    with (pathlib.Path(__file__).parent / "runs").open("a") as file:
        file.write("run\\n")
    assert not first(f"shaky{{number}}")
""",
    )
    assert session.code == code, session.output
    assert session.closing == (f"{number} unstable" if code == 0 else f"{number} failed")
    assert len((tmp_path / "runs").read_text().splitlines()) == runs
    assert (" UNSTABLE " in session.output) == (code == 0)


def test_an_error_in_a_fixture_is_a_failure_of_its_test_and_two_errors_are_one_failure(tmp_path: Path) -> None:
    session = Session(
        tmp_path,
        """
@pytest.fixture(scope="module")
def shared():
    assert not first("setup"), "in the setup of the module"
@pytest.fixture
def left():
    yield
    assert not first("teardown"), "in the teardown"
def test_one(shared):
    pass
def test_other(shared):
    pass
def test_both(left):
    assert not first("call"), "in the call"
def test_good():
    pass
""",
    )
    assert (session.code, session.closing) == (0, "1 passed, 3 unstable"), session.output
    assert all(text in session.block for text in ("in the setup of the module", "in the call", "in the teardown"))
    assert {line for line in session.block.splitlines() if line.startswith("UNSTABLE")} == {
        f"UNSTABLE test_made_up.py::test_{name}" for name in ("one", "other", "both")
    }


def test_odd_ids_are_found_again(tmp_path: Path) -> None:
    ids = ['-k a//b/ $HOME *? it\'s "é" \t', "[x]@y::z[", "@"]
    session = Session(
        tmp_path,
        f"""
@pytest.mark.parametrize("value", {ids!r})
class TestOdd:
    def test_shaky(self, value):
        assert not first(value.encode().hex())
""",
    )
    assert (session.code, session.closing) == (0, "3 unstable"), session.output


@pytest.mark.parametrize(
    ("second", "closing"),
    [("pytest.skip('not today')", "1 failed"), ("os._exit(0)", "1 failed"), ("pytest.xfail('so so')", "1 unstable")],
)
def test_only_a_pass_counts(tmp_path: Path, second: str, closing: str) -> None:
    session = Session(tmp_path, f"def test_shaky():\n    assert not first('shaky')\n    {second}\n")
    assert session.closing == closing, session.output
    assert session.code == int("failed" in closing)


def test_nothing_else_is_tried_again(tmp_path: Path) -> None:
    shaky = "def test_shaky():\n    assert not first('shaky')\n"
    good = "def test_good():\n    pass\n"

    def outcome(name: str, text: str, *options: str) -> tuple[int, str, bool]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        session = Session(folder, text, *options)
        return session.code, session.closing, "once more, alone" in session.output

    assert outcome("import", "assert not first('import')\n" + good) == (2, "1 error", False)
    (tmp_path / "import beside").mkdir()
    (tmp_path / "import beside/test_broken.py").write_text("import nowhere\n")
    assert outcome("import beside", shaky, "--continue-on-collection-errors") == (1, "1 failed, 1 error", False)
    assert outcome("stopped", shaky + good, "-x") == (1, "1 failed", False)
    assert outcome("exit", shaky + "def test_exit():\n    pytest.exit('enough', returncode=7)\n")[::2] == (7, False)
    assert outcome("none", good, "-k", "nothing") == (5, "1 deselected", False)
    assert outcome("good", good) == (0, "1 passed", False)


def test_options_and_selection_hold_for_the_second_run(tmp_path: Path) -> None:
    text = """
def test_shaky(tmp_path, request):
    print("base", tmp_path.parent, request.config.option.tbstyle)
    assert request.config.option.tbstyle == "short" and not first("shaky")
@pytest.mark.slow
def test_slow():
    assert first("slow")
def test_other():
    assert False
"""
    junit, base = tmp_path / "junit.xml", tmp_path / "base"
    session = Session(
        *(tmp_path, text, "-m", "not slow", "-k", "shaky or slow", "--tb=short"),
        *(f"--junitxml={junit}", f"--basetemp={base}", "test_made_up.py::test_shaky", "test_made_up.py::test_slow"),
    )
    assert (session.code, session.closing) == (0, "1 deselected, 1 unstable"), session.output
    assert 'failures="1"' in junit.read_text()  # the whole session's, not the second run's
    assert base.is_dir() and list(base.iterdir())  # neither is what the first one left wiped


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_with_two_workers(tmp_path: Path) -> None:
    session = Session(
        tmp_path,
        """
@pytest.mark.parametrize("value", ["a@b", "x]@y"])
def test_shaky(value):
    assert not os.environ.get("PYTEST_XDIST_WORKER"), "beside others"
@pytest.mark.parametrize("number", range(4))
def test_good(number):
    pass
""",
        *("-n", "2", "--dist", "loadfile"),
        plugins=("xdist",),
    )
    assert (session.code, session.closing) == (0, "4 passed, 2 unstable"), session.output
    assert "UNSTABLE test_made_up.py::test_shaky[a@b]\n" in session.block
    assert "UNSTABLE test_made_up.py::test_shaky[x]@y]\n" in session.block


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_a_worker_that_dies_fails_the_run(tmp_path: Path) -> None:
    session = Session(
        tmp_path,
        "def test_dies():\n    if first('dies'): os._exit(3)\ndef test_good():\n    pass\n",
        *("-n", "1"),
        plugins=("xdist",),
    )
    assert session.code == 1 and "once more, alone" not in session.output, session.output
    assert session.closing == "1 failed, 1 passed"
