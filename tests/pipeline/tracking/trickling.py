"""A tracking server whose answers never become whole."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Trickle(socketserver.BaseRequestHandler):
    """An answer of which a byte comes every tenth of a second, for longer than anybody would wait."""

    def handle(self) -> None:
        self.request.recv(2**16)
        self.server.requests += 1  # type: ignore[attr-defined]
        try:
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self.server.over.wait(0.1):  # type: ignore[attr-defined]
                self.request.sendall(b" ")
        except OSError:
            pass


@contextmanager
def trickling_server() -> Iterator[socketserver.ThreadingTCPServer]:
    """On loopback; counts its `requests`."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Trickle) as server:
        server.over, server.requests = threading.Event(), 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.over.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
