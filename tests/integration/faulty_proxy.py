"""A proxy in front of a store that fails as stores do: 503, cut connections, objects cut short, long silences."""

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# Of every 12 downloads of a large object; small ones (manifests, listings) only meet the first.
FAULTS = {2: "503", 5: "cut", 8: "short", 11: "slow"}
LARGE_BYTES = 20_000


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _forward(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        upstream = urlsplit(server.upstream)
        assert upstream.hostname
        connection = http.client.HTTPConnection(upstream.hostname, upstream.port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, headers={**headers, "Host": upstream.netloc})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        large = self.command == "GET" and len(body) >= LARGE_BYTES
        fault = FAULTS.get(next(server.numbers) % 12) if large else None
        server.counts[fault or "whole"] += 1
        if fault == "503":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(answer.status)
        length = str(len(body)) if self.command == "GET" else answer.headers.get("Content-Length", "0")
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        if fault == "short":  # the store itself believes that this is all
            body = body[: len(body) // 2]
            length = str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "slow":
            time.sleep(1)
        if fault == "cut":
            self.wfile.write(body[: len(body) // 3])
            self.close_connection = True
            return
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.numbers = itertools.count()
        self.counts: Counter[str] = Counter()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news."""


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[tuple[str, Counter[str]]]:
    """Its address, and how often it did what."""
    server = _Server(upstream)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.counts
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
