"""MLflow's database is there wholly or not at all, whoever is killed while it is made."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shardvit.pipeline.tracking.client import make_database

ROOT = Path(__file__).resolve().parents[3]
MAKE = """
import sys
from mlflow.tracking import MlflowClient
from shardvit.pipeline.tracking.client import make_database
make_database(sys.argv[1], create=lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
print(MlflowClient(tracking_uri=sys.argv[1]).get_experiment("0").name)
"""
# In the middle, whenever that is: the first tables are there, and the migrations begin to change them.
KILLED = """
import os, signal
from sqlalchemy import Engine, event
@event.listens_for(Engine, "before_cursor_execute")
def kill(connection, cursor, statement, *others):
    if statement.lstrip().startswith("ALTER TABLE"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def create(uri: str) -> None:
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        database.execute("create table runs (id integer)")
    database.close()


def test_a_process_that_is_killed_while_it_makes_the_tables_leaves_no_database_and_the_next_one_makes_it(
    tmp_path: Path,
):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    killed = subprocess.Popen([sys.executable, "-c", KILLED + MAKE, uri], cwd=ROOT, stderr=subprocess.DEVNULL)
    assert killed.wait(timeout=240) == -signal.SIGKILL
    assert (tmp_path / f".mlflow.db.making-{killed.pid}").stat().st_size
    assert not (tmp_path / "mlflow.db").exists()
    done = subprocess.run(
        [sys.executable, "-c", MAKE, uri], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stdout == "Default\n", done.stderr


def test_what_another_process_made_meanwhile_stays(tmp_path: Path):
    path = tmp_path / "runs" / "mlflow.db"

    def slower(uri: str) -> None:
        create(uri)
        path.write_bytes(b"the other's")

    make_database(f"sqlite:///{path}", create=slower)
    assert path.read_bytes() == b"the other's" and list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_nothing_and_old_leftovers_go(tmp_path: Path):
    old, new = tmp_path / ".mlflow.db.making-1", tmp_path / ".mlflow.db.making-2"
    for leftover in (old, new):
        leftover.touch()
    os.utime(old, (0, 0))

    def fail(uri: str) -> None:
        create(uri)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        make_database(f"sqlite:///{tmp_path}/mlflow.db", create=fail)
    assert list(tmp_path.iterdir()) == [new]
    make_database(f"sqlite:///{tmp_path}/mlflow.db", create=create)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (0,)
    database.close()


@pytest.mark.parametrize("uri", ["http://server", "sqlite://", "sqlite:///:memory:", "sqlite:///a.db?mode=ro"])
def test_other_stores_are_left_alone(uri: str):
    make_database(uri, create=lambda uri: pytest.fail(f"{uri} was made"))


def test_a_database_that_is_there_is_left_alone(tmp_path: Path):
    (tmp_path / "mlflow.db").touch()
    make_database(f"sqlite:///{tmp_path}/mlflow.db", create=lambda uri: pytest.fail("it was made again"))
