"""Output that disappears: a run resumes, a command whose product is its output ends as other tools do.

Real processes and real descriptors: a pipe without a reader, /dev/full, closed streams. Whole runs are in
tests/integration/test_output_lost.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[3]
CLI = "from shardvit.launch.cli import main; import sys; sys.argv[1:] = {arguments}; main()"
GOES_ON = """
import os, subprocess, sys
from shardvit.launch.local.output import go_on
go_on()
for text in ("first", "second"):
    print(text, flush=True)
    print(text, file=sys.stderr)
    os.system("echo a shell; echo a shell >&2")  # what is not Python is written to by numbers
    subprocess.run([sys.executable, "-c", "import sys; print(1, flush=True); sys.stderr.write('2')"])
with open("made", "w") as file:
    assert file.fileno() > 2, "a file has the number of a stream"
    file.write("whole")
"""


def no_reader() -> IO[bytes]:
    """A pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "wb")


def run(folder: Path, code: str, *, shell: str = "", **streams: object) -> subprocess.CompletedProcess[str]:
    """Run Python code; `shell` are a shell's redirections of its own."""
    command = ["bash", "-c", f'exec "$0" "$@" {shell}', sys.executable, "-c", code]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(  # pyright: ignore[reportCallIssue]
        command,
        cwd=folder,
        env=environment,
        text=True,
        timeout=240,
        check=False,
        **given,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("shell", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_that_is_to_go_on_does_whatever_its_streams_are(tmp_path: Path, shell: str) -> None:
    done = run(tmp_path, GOES_ON, shell=shell)
    assert done.returncode == 0 and (tmp_path / "made").read_text() == "whole"
    untouched = done.stdout if shell.startswith("2>") else done.stderr
    both = "<&-" in shell or "&1" in shell
    assert both or ("first" in untouched and "second" in untouched)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_does_not_end_a_process_that_is_to_go_on(tmp_path: Path, stream: str) -> None:
    with no_reader() as gone:
        done = run(tmp_path, GOES_ON, **{stream: gone})
    other = done.stderr if stream == "stdout" else done.stdout
    assert done.returncode == 0 and (tmp_path / "made").read_text() == "whole"
    assert "first" in other and "second" in other


def test_what_can_be_written_again_is_written(tmp_path: Path) -> None:
    """A disk that was full for a moment: only what came meanwhile is lost, and the descriptor stays the same."""
    code = """
import os, sys
from shardvit.launch.local.output import go_on
go_on()
whole = os.dup(1)
print("before", flush=True)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
print("meanwhile", flush=True)
os.dup2(whole, 1)
print("afterwards", flush=True)
"""
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafterwards\n", "")


PRODUCTS = (["--help"], ["plan", "digits"], ["plan", "digits", "--json"], ["run", "--help"])


@pytest.mark.parametrize("arguments", PRODUCTS)
def test_a_reader_that_left_ends_a_product_as_it_ends_other_tools(tmp_path: Path, arguments: list[str]) -> None:
    with no_reader() as gone:
        done = run(tmp_path, CLI.format(arguments=arguments), stdout=gone)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", PRODUCTS)
def test_a_full_disk_under_a_product_is_one_sentence(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, CLI.format(arguments=arguments), shell=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("shardvit: standard output") and "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_end_no_command(tmp_path: Path, shell: str) -> None:
    assert run(tmp_path, CLI.format(arguments=["plan", "digits"]), shell=shell).returncode == 0
    assert run(tmp_path, CLI.format(arguments=["plan", "no such recipe"]), shell=shell).returncode == 2


def test_streams_that_somebody_else_has_put_there_stay(capsys: pytest.CaptureFixture[str]) -> None:
    from shardvit.launch.local.output import go_on

    before = sys.stdout, sys.stderr
    go_on()
    assert (sys.stdout, sys.stderr) == before
    print("seen")
    assert capsys.readouterr().out == "seen\n"
