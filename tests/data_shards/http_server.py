"""A real HTTP server on loopback whose answers go wrong when told to: from a table of files, or as a proxy."""

import hashlib
import http.client
import re
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Answer = tuple[int, list[tuple[str, str]], bytes]


@dataclass
class FaultServer:
    """`files` by path; `faults[path]` are used up one a request (GET), or `always[path]` for all of them.

    A fault: an HTTP status such as "503"; "cut:N" (N bytes under the full length, then the end); "reset:N" (the same,
    with a reset); "stall:N" (N bytes, then nothing); "short:N" (N bytes, as if that were all); "garbage" (wrong bytes
    of the right number); "close:N" (N bytes, no length told, closed in order); "connection:N" (the connection ends when
    N bytes of files have passed it, over all its requests).
    """

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, deque[str]] = field(default_factory=dict)
    always: dict[str, str] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)  # path to place, whatever is asked of it
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range header
    asked: list[tuple[str, str]] = field(default_factory=list)  # method, path with query
    has_ranges: bool = True
    tag: Literal["strong", "weak"] = "strong"  # kind of ETag
    upstream: tuple[str, int] | None = None
    # A fault by method and path with its query, "" for none: a status, "drop" (the connection is cut before the request
    # is passed on), "deaf" (cut after it, before the answer) or "unlisted" (a listing of nothing).
    meddle: Callable[[str, str], str] = lambda method, path: ""
    pause_seconds: float = 0.0  # before each 64 KiB
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def count(self, path: str) -> int:
        """GET requests for a path, but for those that ask for its first byte only."""
        return sum(method == "GET" and at == path and span != "bytes=0-0" for method, at, span in self.requests)

    def totals(self) -> Counter[str]:
        return Counter({path: self.count(path) for _, path, _ in self.requests})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    passed_bytes = 0  # on this connection

    def log_message(self, format: str, *args: object) -> None:
        pass

    @property
    def told(self) -> FaultServer:
        return self.server.told  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        told, path, span = self.told, self.path.partition("?")[0], self.headers.get("Range", "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told.requests.append((self.command, path, span))
        told.asked.append((self.command, self.path))
        meddled = told.meddle(self.command, self.path)
        if meddled in ("drop", "deaf"):
            if meddled == "deaf":
                self._upstream(body)
            self.close_connection = True
            return
        if meddled:
            listing = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>" if meddled == "unlisted" else b""
            self.send_response_only(200 if listing else int(meddled))
            self.send_header("Content-Length", str(len(listing)))
            self.end_headers()
            self.wfile.write(listing)
            return
        status, headers, content = self._upstream(body) if told.upstream else self._file(path, span)
        fault = ""
        if self.command == "GET" and span != "bytes=0-0" and status < 300:
            queue = told.faults.get(path)
            fault = queue.popleft() if queue else told.always.get(path, "")
        kind, _, number = fault.partition(":")
        if kind.isdigit():
            status, headers, content = int(kind), [], b"<Error><Code>%s</Code></Error>" % kind.encode()
        told_bytes = len(content)
        if kind == "garbage":
            content = bytes(255 - byte for byte in content)
        elif kind == "connection":
            content = content[: max(0, int(number) - self.passed_bytes)]
            self.passed_bytes += len(content)
            self.close_connection = self.passed_bytes == int(number)
        elif number:
            content = content[: int(number)]
            told_bytes = len(content) if kind == "short" else told_bytes
        if (place := told.redirects.get(path)) is not None:
            name, _, value = place.rpartition(" ")  # "URI http://...": by the header that came before Location
            status, headers, content, told_bytes = 302, [(name or "Location", value)], b"", 0
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command == "HEAD":
            self.end_headers()
            return
        if kind == "close":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(told_bytes))
        self.end_headers()
        try:
            for start in range(0, len(content), 2**16):
                told.released.wait(told.pause_seconds)
                self.wfile.write(content[start : start + 2**16])
        except OSError:
            self.close_connection = True
            return
        if kind == "stall":
            told.released.wait(240)  # until the client has had enough, or the test
        if kind in ("reset", "stall"):
            # A reset rather than an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if kind in ("cut", "reset", "stall", "close"):
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _file(self, path: str, span: str) -> Answer:
        content = self.told.files.get(path)
        if content is None:
            return 404, [], b"not here"
        tag = ("W/" if self.told.tag == "weak" else "") + f'"{hashlib.md5(content).hexdigest()}"'
        headers = [("ETag", tag)] if self.told.has_ranges else []
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", span)
        if match and self.told.has_ranges and self.headers.get("If-Range", tag) == tag:
            if int(match[1]) >= len(content):
                return 416, [("Content-Range", f"bytes */{len(content)}")], b""
            first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            return 206, [*headers, ("Content-Range", f"bytes {first}-{last}/{len(content)}")], content[first : last + 1]
        return 200, headers, content

    def _upstream(self, body: bytes) -> Answer:
        assert self.told.upstream
        connection = http.client.HTTPConnection(*self.told.upstream, timeout=240)
        try:
            connection.request(self.command, self.path, body=body, headers=dict(self.headers))
            response = connection.getresponse()
            skipped = {"server", "date", "connection", "transfer-encoding"}
            skipped |= set() if self.command == "HEAD" else {"content-length"}
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in skipped]
            return response.status, headers, response.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients of these tests hang up as they like


@contextmanager
def serve(told: FaultServer) -> Iterator[FaultServer]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.told = told  # type: ignore[attr-defined]
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield told
    finally:
        told.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
