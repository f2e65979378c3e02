"""MLflow's server, on loopback."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from shardvit.launch.doctor.network import check_tracking


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, int]]]:
    """A server's address, and what it answers to paths; it has all the time that it may need."""
    monkeypatch.setattr("shardvit.launch.doctor.network._MLFLOW_SECONDS", 240.0)
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
def test_other_stores(uri: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardvit.launch.doctor.network._status", lambda url: pytest.fail("nothing is to be asked"))
    check = check_tracking(uri)
    assert check.verdict == verdict and "secret" not in check.found
