"""A loopback store with a delay before each answer: files over HTTP with ranges, or S3 by moto's server.

Started as `python -m shardvit.launch.bench.data_server`, a process of its own, so that its time is nobody else's. It
counts requests, and how many were open at once. The delay stands for the way to the store and its first byte; bandwidth
is the loopback's, and moto holds and copies whole objects, so figures of one kind of store compare loaders only.
"""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

StoreKind = Literal["http", "s3"]
BUCKET = "bench"

_CONTROL = "/-bench-/"  # GET /-bench-/DELAY_MS sets the delay, and tells and forgets the counts
_READY_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """Requests that a store has answered since it was asked last."""

    requests: int
    most_open: int  # at once
    megabytes: float


class _Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delay_seconds = 0.0
        self._open = self._requests = self._most_open = self._bytes = 0

    def reset(self, delay_ms: float) -> Asked:
        with self._lock:
            found = Asked(self._requests, self._most_open, self._bytes / 1e6)
            self._delay_seconds = delay_ms / 1000
            self._requests = self._bytes = 0
            self._most_open = self._open
        return found

    def sent(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with self._lock:
            self._requests += 1
            self._open += 1
            self._most_open = max(self._most_open, self._open)
        try:
            time.sleep(self._delay_seconds)
            yield
        finally:
            with self._lock:
                self._open -= 1


class RunningStore:
    """A store in its own process; `url` is where it has the folder's files."""

    def __init__(self, port: int, kind: StoreKind) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.url = self.endpoint if kind == "http" else f"s3://{BUCKET}"
        self.environment = {} if kind == "http" else _credentials(self.endpoint)
        self._port = port

    def reset(self, *, delay_ms: float) -> Asked:
        """Set the delay; tell what was asked since the last call."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_READY_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", f"{_CONTROL}{delay_ms}")
            return Asked(**json.loads(connection.getresponse().read()))


@contextlib.contextmanager
def running_store(kind: StoreKind, folder: Path) -> Iterator[RunningStore]:
    """Serve a folder; RuntimeError if the server does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardvit.launch.bench.data_server", kind, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {kind} server did not start")
        yield RunningStore(int(line), kind)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _credentials(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,  # Mosaic's
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class _Files(BaseHTTPRequestHandler):
    """Static files by sendfile; a name is a path below the folder."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    counts: _Counts
    folder: Path

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith(_CONTROL):
            self._answer(200, [], json.dumps(asdict(self.counts.reset(float(self.path[len(_CONTROL) :])))).encode())
            return
        with self.counts.request(), contextlib.suppress(ConnectionError):
            self._file()

    do_HEAD = do_GET

    def _file(self) -> None:
        try:
            file = (self.folder / unquote(self.path).lstrip("/")).open("rb")
        except OSError:
            self._answer(404, [], b"")
            return
        with file:
            size, first = os.fstat(file.fileno()).st_size, 0
            last, headers = size - 1, [("ETag", f'"{size}"'), ("Accept-Ranges", "bytes")]
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if span:
                first, last = int(span[1]), min(int(span[2] or last), last)
                headers.append(("Content-Range", f"bytes {first}-{last}/{size}"))
            self._answer(206 if span else 200, headers, None, num_bytes=last - first + 1)
            if self.command == "GET":
                self.counts.sent(last - first + 1)
                while first <= last:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), first, last + 1 - first)
                    if not sent:
                        return
                    first += sent

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes | None, *, num_bytes: int = 0) -> None:
        self.send_response_only(status)
        for name, value in [*headers, ("Content-Length", str(num_bytes if body is None else len(body)))]:
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(body)


class _FileServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients end their connections as they like


def _serve_files(folder: Path) -> None:
    handler = type("Files", (_Files,), {"counts": _Counts(), "folder": folder})
    with _FileServer(("127.0.0.1", 0), handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


def _serve_s3(folder: Path) -> None:
    moto_server, serving = import_module("moto.server"), import_module("werkzeug.serving")  # of the tests' extra

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    counts, moto = _Counts(), moto_server.DomainDispatcherApplication(moto_server.create_backend_app)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith(_CONTROL):
            start_response("200 OK", [("Content-Type", "application/json")])
            yield json.dumps(asdict(counts.reset(float(path[len(_CONTROL) :])))).encode()
            return
        with counts.request():
            for piece in moto(environ, start_response):
                counts.sent(len(piece))
                yield piece

    options = {"protocol_version": "HTTP/1.1", "disable_nagle_algorithm": True}
    keeping = type("Keeping", (serving.WSGIRequestHandler,), options)
    server = serving.make_server("127.0.0.1", 0, application, threaded=True, request_handler=keeping)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.closing(HTTPConnection("127.0.0.1", server.server_port, timeout=_READY_SECONDS)) as connection:

        def put(path: str, body: bytes | None = None) -> None:
            connection.request("PUT", path, body=body, headers={"x-amz-acl": "public-read"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"moto: {answer.status} for {path}")

        put(f"/{BUCKET}")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                put(f"/{BUCKET}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    print(server.server_port, flush=True)
    thread.join()


if __name__ == "__main__":
    {"http": _serve_files, "s3": _serve_s3}[sys.argv[1]](Path(sys.argv[2]))
