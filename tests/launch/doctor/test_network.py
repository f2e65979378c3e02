"""Two real processes that add numbers up; what their failures are called; and MLflow's server on loopback."""

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.doctor.child import MARK, Answer
from launch.doctor.network import check_all_reduce, check_tracking, judge_all_reduce
from launch.env import without_place

ROOT = Path(__file__).resolve().parents[3]


def environment() -> dict[str, str]:
    return {**without_place(), "PYTHONPATH": str(ROOT)}


def test_two_real_processes():
    check = check_all_reduce("gloo", environment=environment(), limit_seconds=240)
    assert check.verdict == "fine" and check.name == "2 processes, gloo", check
    assert "all-reduce of one number" in check.found and "B/s" in check.found


def test_they_are_told_their_place_as_shardvit_run_does_it():
    code = (
        "import json, os; from launch.env import read_place; place = read_place()\n"
        "assert place.world_size == place.local_world_size == 2 and place.rank == place.local_rank\n"
        "assert os.listdir(place.rendezvous) == [] or place.rank == 1\n"
        f"print('{MARK}' + json.dumps(dict(latency_seconds=1e-3, bytes_per_second=5e8)))"
    )
    outer = {**environment(), "RANK": "7", "WORLD_SIZE": "64", "LOCAL_RANK": "7", "SLURM_PROCID": "7"}
    check = check_all_reduce("gloo", environment=outer, command=[sys.executable, "-c", code])
    assert check.verdict == "fine" and check.found == "all-reduce of one number 1 ms, of 17 MB 500 MB/s", check


def test_a_process_that_crashes_is_named_and_not_the_one_that_waited():
    code = "import os, time; os.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else time.sleep(600)"
    check = check_all_reduce("gloo", environment=os.environ, command=[sys.executable, "-c", code])
    assert check.verdict == "problem" and "process 1 died of signal 11 (SIGSEGV)" in check.found
    assert "/etc/hosts" in check.remedy


def test_processes_that_hang():
    code = "import time; time.sleep(600)"
    check = check_all_reduce("nccl", environment=os.environ, command=[sys.executable, "-c", code], limit_seconds=3)
    assert check.verdict == "problem" and "did not end within 3 seconds" in check.found
    assert "NCCL_DEBUG=INFO" in check.remedy


def test_a_wrong_sum_is_a_problem():
    answers = [Answer(1, "", "the sum came out as 2.0\n", 60)] * 2
    check = judge_all_reduce("gloo", answers)
    assert check.verdict == "problem" and "the sum came out as 2.0" in check.found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, int]]]:
    """A server's address, and what it answers to paths; it has all the time that it may need."""
    monkeypatch.setattr("launch.doctor.network._MLFLOW_SECONDS", 240.0)
    answers: dict[str, int] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{running.server_port}", answers
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "verdict"), [(200, "fine"), (401, "note"), (403, "note"), (404, "problem")])
def test_an_mlflow_server(server: tuple[str, dict[str, int]], status: int, verdict: str):
    address, answers = server
    answers["/health"] = status
    check = check_tracking(f"http://me:secret@{address}/")
    assert check.verdict == verdict, check
    assert "secret" not in check.found + check.remedy and address in check.found


def test_a_server_that_is_not_there():
    check = check_tracking("http://me:secret@127.0.0.1:1")
    assert check.verdict == "problem" and "does not answer" in check.found and "secret" not in check.found


@pytest.mark.parametrize(
    ("uri", "verdict"),
    [
        (None, "fine"),
        ("sqlite:///runs/mlflow.db", "fine"),
        ("postgresql://me:secret@db/mlflow", "fine"),
        ("databricks", "fine"),
        ("file:///data/mlruns", "problem"),
        ("./mlruns", "problem"),
    ],
)
def test_other_stores(uri: str | None, verdict: str):
    check = check_tracking(uri, get=lambda url: pytest.fail("nothing is to be asked"))
    assert check.verdict == verdict and "secret" not in check.found
