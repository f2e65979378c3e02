"""W&B as its client sees it: enough of the server's GraphQL and file stream, on loopback, to keep what runs send."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stored:
    """A run on the server: lines by offset, so that what is sent twice is stored twice."""

    history: dict[int, str] = field(default_factory=dict)
    summary: str = "{}"
    bucket: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(self.history[at]) for at in sorted(self.history)]


@dataclass
class Server:
    """The server's address, runs by id, and whether it answers."""

    address: str
    runs: dict[str, Stored] = field(default_factory=dict)
    is_alive: bool = True
    headers: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/graphql":
            query = json.loads(body)
            return {"data": self._graphql(query["query"], query.get("variables") or {})}
        if path.endswith("/file_stream"):
            run = self.runs.setdefault(path.split("/")[-2], Stored())
            for name, part in (json.loads(body).get("files") or {}).items():
                if name == "wandb-history.jsonl":
                    run.history |= {part["offset"] + at: line for at, line in enumerate(part["content"])}
                if name == "wandb-summary.json":
                    run.summary = part["content"][-1]
        return {}

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            model = {"id": "m", "name": given["project"], "entity": {"id": "e", "name": "me"}, "bucket": None}
            if (run := self.runs.get(given["name"])) is not None:
                lines = [run.history[at] for at in sorted(run.history)]
                model["bucket"] = {
                    **{"id": "b", "name": given["name"], "summaryMetrics": run.summary, "displayName": "x"},
                    **{"logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": 0},
                    **{"historyTail": json.dumps(lines[-1:]), "eventsTail": "[]", "config": "{}", "tags": []},
                    **{"notes": "", "wandbConfig": json.dumps({"t": 1})},
                }
            return {"model": model}
        if "UpsertBucket" in query:
            run = self.runs.setdefault(given["name"], Stored())
            run.bucket |= {name: value for name, value in given.items() if value is not None}
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": given["name"], "displayName": "x", "sweepName": None, "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if "CreateRunFiles" in query:
            self.runs[given["run"]].files |= set(given["files"])
            files = [
                {"name": name, "uploadUrl": f"{self.address}/upload/{at}"} for at, name in enumerate(given["files"])
            ]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}


@contextmanager
def wandb_server() -> Iterator[Server]:
    """Serve until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with lock:
                code, answer = (200, server.answer(self.path, body)) if server.is_alive else (503, {})
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST

    lock = threading.Lock()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
