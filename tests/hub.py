"""A hub on loopback: the endpoints that the real huggingface_hub client calls to read, make and write repositories.

In memory, with commits, branches, LFS (`*.safetensors`, `*.bin`, `*.tar`), private and gated repositories, and a list
of all requests. It can be taken down.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS = (".safetensors", ".bin", ".tar", ".npz")
TOKEN = "hf_MarkedTokenThatMustNotShowUp0000"
WHEN = "2026-11-25T00:00:00.000Z"


@dataclass
class Repository:
    """Commits by digest, newest last, and branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)
    access: str = "public"  # private, gated

    def commit(self, files: Mapping[str, bytes], *, message: str = "files", branch: str = "main") -> str:
        content = {**self.commits.get(self.refs.get(branch, ""), {}), **files}
        sha = hashlib.sha1(repr((len(self.commits), sorted(content))).encode()).hexdigest()
        self.commits[sha] = content
        self.refs[branch] = sha
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


@dataclass
class Hub:
    """What the server holds and saw."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)  # "models/OWNER/NAME", "datasets/OWNER/NAME"
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, authorization
    down: bool = False
    writable: bool = True

    def add(self, name: str, files: Mapping[str, bytes], *, kind: str = "models", access: str = "public") -> Repository:
        made = self.repositories.setdefault(f"{kind}/{name}", Repository(access=access))
        made.commit(files)
        return made

    def add_folder(self, name: str, folder: Path, *, kind: str = "models") -> Repository:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.add(name, files, kind=kind)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
    if path.endswith(LFS):
        digest = hashlib.sha256(content).hexdigest()
        made["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return made | {"lastCommit": {"id": "0" * 40, "title": "files", "date": WHEN}}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self.chunk, b""))
        hub, authorization = self.hub, self.headers.get("Authorization", "")
        hub.requests.append((self.command, self.path, authorization))
        if hub.down:
            self.answer(503)
            return
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        may_write = hub.writable and authorization == f"Bearer {TOKEN}"
        if path.startswith("/objects/"):
            hub.objects[path.removeprefix("/objects/")] = body
            self.answer(200)
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif path == "/api/whoami-v2":
            self.answer(200, {"name": "someone"}) if authorization else self.refuse(401, "Unauthorized")
        elif path == "/api/repos/create":
            self.create(json.loads(body)) if may_write else self.refuse(403 if authorization else 401, "Forbidden")
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(body))
        elif match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/([^/]+)(?:/(.*))?)?)?", path
        ):
            kind, name, what, revision, below = match.groups()
            self.api(f"{kind}/{name}", what or "revision", revision or "main", below or "", query, body, may_write)
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = match.groups()
            self.resolve(f"{(kind or 'models/')}{name}", revision, file)
        else:
            self.answer(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        content = self.rfile.read(size)
        self.rfile.readline()
        return content

    def found(self, key: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(key)
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not authorized):
            self.refuse(404 if authorized else 401, "RepoNotFound")
        elif (sha := repository.at(revision)) is None:
            self.refuse(404, "RevisionNotFound")
        else:
            return repository, sha
        return None

    def create(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or "someone"
        kind = f"{asked.get('type') or 'model'}s"
        key, name = f"{kind}/{owner}/{asked['name']}", f"{owner}/{asked['name']}"
        shown = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{name}"
        if key in self.hub.repositories:
            self.answer(409, {"error": "exists", "url": shown})
            return
        access = "private" if asked.get("visibility") == "private" or asked.get("private") else "public"
        self.hub.repositories[key] = Repository(access=access)
        self.hub.repositories[key].commit({".gitattributes": b"*.safetensors filter=lfs\n"}, message="initial commit")
        self.answer(200, {"url": shown, "name": name, "id": "1"})

    def batch(self, asked: dict[str, Any]) -> None:
        made = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/objects/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": made})

    def api(
        self, key: str, what: str, revision: str, below: str, query: dict[str, list[str]], body: bytes, may_write: bool
    ) -> None:
        if (found := self.found(key, revision)) is None:
            return
        repository, sha = found
        files = repository.commits[sha]
        entries = [entry(path, content) for path, content in files.items()]
        match what:
            case "revision":
                siblings = [{"rfilename": path} for path in files]
                state = {"private": repository.access == "private", "gated": repository.access == "gated"}
                about = {"id": key.partition("/")[2], "sha": sha, "siblings": siblings, "tags": [], "downloads": 0}
                self.answer(200, about | state | {"lastModified": WHEN, "createdAt": WHEN, "disabled": False})
            case "tree":
                inside = [each for each in entries if not below or each["path"].startswith(f"{below}/")]
                if below and not inside:
                    self.refuse(404, "EntryNotFound")
                    return
                if query.get("recursive", ["False"])[0].lower() not in ("true", "1"):
                    depth = below.count("/") + 1 if below else 0
                    folders = {"/".join(each["path"].split("/")[: depth + 1]) for each in inside}
                    inside = [each for each in inside if each["path"] in folders]
                    inside += [
                        {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
                        for folder in sorted(folders - set(files))
                    ]
                self.answer(200, inside)
            case "paths-info":
                asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
                exact = [each for each in entries if each["path"] in asked]
                folders = [each for each in asked if any(path.startswith(f"{each}/") for path in files)]
                self.answer(200, exact + [{"type": "directory", "path": each, "oid": "0" * 40} for each in folders])
            case "commits":
                self.answer(200, [{"id": sha, "title": "files", "message": "", "authors": [], "date": WHEN}])
            case "preupload" | "commit" if not may_write:
                self.refuse(403, "Forbidden")
            case "preupload":
                modes = [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["path"].endswith(LFS) else "regular",
                        "shouldIgnore": False,
                    }
                    for each in json.loads(body)["files"]
                ]
                self.answer(200, {"files": modes})
            case "commit":
                new: dict[str, bytes] = {}
                lines = [json.loads(line) for line in body.splitlines() if line]
                for line in lines[1:]:
                    value = line["value"]
                    content = base64.b64decode(value["content"]) if line["key"] == "file" else None
                    new[value["path"]] = self.hub.objects[value["oid"]] if content is None else content
                made = repository.commit(new, message=lines[0]["value"]["summary"], branch=revision)
                url = f"{self.hub.url}/{key.partition('/')[2]}/commit/{made}"
                self.answer(200, {"success": True, "commitOid": made, "commitUrl": url, "hookOutput": ""})
            case _:
                self.answer(404)

    def resolve(self, key: str, revision: str, path: str) -> None:
        if (found := self.found(key, revision)) is None:
            return
        repository, sha = found
        if repository.access == "gated" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(403, "GatedRepo")
            return
        if (content := repository.commits[sha].get(path)) is None:
            self.refuse(404, "EntryNotFound")
            return
        about = entry(path, content)
        tag = about["lfs"]["oid"] if "lfs" in about else about["oid"]
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if "lfs" in about:
            headers |= {"X-Linked-ETag": f'"{tag}"', "X-Linked-Size": str(len(content))}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(span[1]), min(int(span[2] or len(content)) + 1, len(content))
            self.answer(206, content[begin:end], Content_Range=f"bytes {begin}-{end - 1}/{len(content)}", **headers)
        else:
            self.answer(200, content, **headers)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Path, *, token: str = "") -> dict[str, str]:
    """Variables with which a process finds this hub, and a home without anything of the user's."""
    found = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache")}
    return found | {
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def find_hub(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, *, token: str = "") -> None:
    """The same for this process, where huggingface_hub may have read the variables already."""
    from huggingface_hub import constants

    for name, value in environment(hub, home, token=token).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
