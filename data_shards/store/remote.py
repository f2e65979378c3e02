"""Read remote bytes, one attempt at a time: fsspec's stores, including HTTP, and programs' output (`commands`).

A store is read in ranges of 8 MiB, four at a time where fsspec is asynchronous: one stream rarely saturates a network
card, and fsspec's `get_file` can neither be stopped nor resumed. A web server without ranges gets one streamed GET.

A store's settings are fsspec's own, from the environment or ~/.config/fsspec/*.json: `AWS_ENDPOINT_URL` or
`FSSPEC_S3_ENDPOINT_URL` for MinIO and the like, `FSSPEC_S3_ANON=true` for public buckets without credentials,
`FSSPEC_S3='{"profile": "x"}'` for anything else. HTTP takes passwords from the URL or ~/.netrc, and proxies from the
environment. Other stores need their fsspec package, such as adlfs for az://. Each process makes its own file systems;
they are never shared with a fork or pickled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import os
import re
import socket
import time
from collections import deque
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import Commands, protocol, redact_text, redacted, require_no_command
from shardvit.data_shards.shards.webdataset_parts import part
from shardvit.data_shards.store.commands import gopen_pieces, pipe_pieces
from shardvit.data_shards.store.remote_errors import (
    DownloadStopped,
    Missing,
    Refused,
    Stop,
    Transient,
    Wrong,
    failure_of_status,
    translate_errors,
)

Result = TypeVar("Result")
Pieces = Generator[bytes, None, None]

RANGE_BYTES = 8 * 2**20
REQUESTS_IN_FLIGHT = 32  # of a process to one store
_RANGES_OF_A_SIZE = 4
_RANGES_IN_FLIGHT = 4
_STREAM_PIECE_BYTES = 2**20
# A server is stalled below this average over the ranges in flight.
_LEAST_BYTES_PER_SECOND = 100_000
_POLL_SECONDS = 0.1
# of fsspec's facts, those that change with an object
_FINGERPRINTS = ("ETag", "etag", "md5Hash", "generation", "blob_id")
_FINGERPRINTS += ("LastModified", "last_modified", "mtime", "updated")


@dataclass(frozen=True)
class About:
    """Facts about a remote object."""

    num_bytes: int | None  # None: unknown
    fingerprint: str  # changes with the object; "": unknown
    ranges: Literal["yes", "with a digest", "no"]  # "with a digest": which must prove that ranges are of one object


class Remotes:
    """Open remote objects by URL; picklable. A transfer without a byte for `stall_seconds` is lost.

    `requests` is the number of times that boto tries each one to a bucket.
    """

    def __init__(self, connect_seconds: float, stall_seconds: float, commands: Commands, requests: int = 1) -> None:
        self._requests = requests
        self._connect_seconds, self._stall_seconds = connect_seconds, stall_seconds
        self._commands: Commands = commands
        self._file_systems: dict[tuple[object, ...], Any] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leave out file systems: their sockets and threads belong to this process."""
        return {**vars(self), "_file_systems": {}}

    def object(self, url: str, *, stop: Stop = lambda: False, num_bytes: int = 0) -> Output | Stored:
        """Return the object at `url`, not requested yet; UserError if a package is missing, or a program may run.

        `num_bytes` is the most that one call moves, if that is more than the ranges in flight.
        """
        require_no_command(url, commands=self._commands)
        kind = protocol(url)
        if kind == "pipe" or _needs_gopen(kind):
            run = pipe_pieces if kind == "pipe" else gopen_pieces
            return Output(partial(run, url, stall_seconds=self._stall_seconds, stop=stop))
        wait_seconds = self._connect_seconds + self._stall_seconds
        wait_seconds += max(num_bytes, _RANGES_IN_FLIGHT * RANGE_BYTES) / _LEAST_BYTES_PER_SECOND
        made_by = _Page if kind in ("http", "https") else Stored
        return made_by(self._file_system(url), url, wait_seconds=wait_seconds, stop=stop)

    def _file_system(self, url: str) -> Any:
        """Make fsspec's file system for a kind of URL, once per process."""
        kind = protocol(url)
        try:
            import fsspec
            from fsspec.config import conf

            made_by: Any = fsspec.get_filesystem_class(kind)
            options: dict[str, Any] = made_by._get_kwargs_from_urls(url)
            key = (os.getpid(), kind, repr(sorted(options.items())))
            if key not in self._file_systems:
                options |= self._options(kind, conf.get(kind, {}))
                self._file_systems[key] = made_by(**options, skip_instance_cache=True)
                if kind in ("s3", "s3a"):
                    self._file_systems[key].retries = 1  # `download` retries
                listings = getattr(self._file_systems[key], "dircache", None)
                if listings is not None and hasattr(listings, "use_listings_cache"):  # the hub's is a dict
                    listings.use_listings_cache = False  # it would answer for objects that others have written since
        except ImportError as error:
            raise UserError(f"{redacted(url)}: for {kind}:// a Python package is missing: {error}") from None
        except ValueError as error:
            raise UserError(f"{redacted(url)}: {redact_text(str(error))}: check the part before ://") from None
        return self._file_systems[key]

    def _options(self, kind: str, configured: dict[str, Any]) -> dict[str, Any]:
        """Timeouts and the like, as defaults below the user's configuration."""
        if kind in ("http", "https"):
            from aiohttp import ClientTimeout, TraceConfig

            trace = TraceConfig()
            trace.on_request_redirect.append(_check_redirect)
            timeout = ClientTimeout(total=None, sock_connect=self._connect_seconds, sock_read=self._stall_seconds)
            client = {"timeout": timeout, "trust_env": True, "trace_configs": [trace]}  # proxies and ~/.netrc
            client["read_bufsize"] = _STREAM_PIECE_BYTES  # aiohttp's 64 KiB cost a third more time
            return {"client_kwargs": {**client, **configured.get("client_kwargs", {})}}
        if kind in ("s3", "s3a"):
            config = {"connect_timeout": self._connect_seconds, "read_timeout": self._stall_seconds}
            config |= {"retries": {"mode": "standard", "total_max_attempts": self._requests}}
            config |= {"max_pool_connections": REQUESTS_IN_FLIGHT}
            return {"config_kwargs": {**config, **configured.get("config_kwargs", {})}}
        return {}


def _needs_gopen(kind: str) -> bool:
    """True if webdataset's gopen knows this kind of URL and fsspec does not."""
    import fsspec
    from fsspec.registry import registry

    return kind not in fsspec.available_protocols() and kind not in registry and kind in part("gopen").gopen_schemes


class Output:
    """A program's output: an object of unknown size."""

    def __init__(self, start: partial[Pieces]) -> None:
        self._start = start

    def about(self) -> About:
        return About(None, "", "no")

    def pieces(self, about: About, *, begin: int, range_bytes: int | None) -> Pieces:
        return self._start()


class Stored:
    """An object in one of fsspec's stores; its methods raise a `Failure`, or DownloadStopped when `stop` is True."""

    def __init__(self, file_system: Any, url: str, *, wait_seconds: float, stop: Stop) -> None:
        self.fs, self.path, self.kind = file_system, file_system._strip_protocol(url), protocol(url)
        self._wait_seconds, self._stop = wait_seconds, stop

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of fsspec's file system, by its public name."""
        with translate_errors():
            if self.fs.async_impl:
                return self.wait(getattr(self.fs, f"_{method}")(*args, **options))
            return getattr(self.fs, method)(*args, **options)

    def about(self) -> About:
        info = self.call("info", self.path)
        if info.get("type") == "directory":
            raise Missing("it is a folder")
        if info.get("size") is None:
            raise Refused("the store does not tell its size")
        return About(info["size"], fingerprint_of(info), "yes")

    def stamped(self, start: int, end: int) -> tuple[bytes, str]:
        """Read bytes `start` to `end`, fewer at the object's end, and its fingerprint."""
        fingerprint = self.about().fingerprint
        return self.call("cat_file", self.path, start=start, end=end), fingerprint

    def pieces(self, about: About, *, begin: int, range_bytes: int | None) -> Pieces:
        """Yield its bytes from `begin` on, at most 8 MiB at a time; closing the generator ends the transfer.

        `Wrong` if the object lost the fingerprint of `about` (unless ""). The first ranges have `range_bytes`; None: no
        ranges.
        """
        yield from self._ranges(about, begin=begin, range_bytes=range_bytes or RANGE_BYTES)
        # The ranges may come from different objects.
        if about.fingerprint and self.about() != about:
            raise Wrong("it was replaced while it was read")

    def _ranges(self, about: About, *, begin: int, range_bytes: int) -> Pieces:
        def ask(start: int, end: int) -> tuple[int, int, concurrent.futures.Future[bytes] | None]:
            if not self.fs.async_impl:
                return start, end, None
            return start, end, asyncio.run_coroutine_threadsafe(self._range(about, start, end), self.fs.loop)

        assert about.num_bytes is not None
        spans = _spans(begin, about.num_bytes, range_bytes=range_bytes)
        asked = deque(ask(*span) for span in islice(spans, _RANGES_IN_FLIGHT))
        try:
            while asked:
                if self._stop():
                    raise DownloadStopped
                start, end, future = asked.popleft()
                with translate_errors():
                    piece = self._result(future) if future else self.fs.cat_file(self.path, start=start, end=end)
                if 0 < len(piece) <= end - start:
                    yield piece
                if len(piece) != end - start:
                    raise Transient(f"{len(piece)} bytes came where {end - start} were asked for")
                asked.extend(ask(*span) for span in islice(spans, 1))
        finally:
            for *_, future in asked:
                if future:
                    future.cancel()

    async def _range(self, about: About, start: int, end: int) -> bytes:
        return await self.fs._cat_file(self.path, start=start, end=end)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._result(asyncio.run_coroutine_threadsafe(coroutine, self.fs.loop))

    def _result(self, future: concurrent.futures.Future[Result]) -> Result:
        deadline = time.monotonic() + self._wait_seconds
        try:
            while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
                if self._stop():
                    raise DownloadStopped
                if time.monotonic() > deadline:
                    raise Transient("the server hardly sends anything")
            return future.result()
        finally:
            future.cancel()


class _Page(Stored):
    """A file on a web server, by fsspec's session: its own `_info` and `_cat_file` hide failures and wrong ranges."""

    def about(self) -> About:
        # Not HEAD: a signature in the URL may allow only GET.
        with translate_errors():
            response = self.wait(self._get("bytes=0-0"))
            self._close(response)
        headers, found = response.headers, _tag(response)
        size = re.fullmatch(r"bytes (?:0-0|\*)/(\d+)", headers.get("Content-Range", "").strip())
        if response.status in (206, 416) and size:
            # With a strong ETag, in quotes, equal tags mean equal bytes.
            return About(int(size[1]), found, "yes" if found.startswith('"') else "with a digest")
        return About(_length(response) if response.status == 200 else None, found, "no")

    def pieces(self, about: About, *, begin: int, range_bytes: int | None) -> Pieces:
        return self._stream(about) if range_bytes is None else self._ranges(about, begin=begin, range_bytes=range_bytes)

    def _stream(self, about: About) -> Pieces:
        with translate_errors():
            response = self.wait(self._get(""))
        try:
            _check(response, about)
            if about.num_bytes is not None and (length := _length(response)) not in (None, about.num_bytes):
                raise Wrong(f"it has {length} bytes where {about.num_bytes} are expected")
            while True:
                with translate_errors():
                    piece = self.wait(read(response, _STREAM_PIECE_BYTES))
                if not piece:
                    return
                yield piece
        finally:
            self._close(response)

    async def _range(self, about: About, start: int, end: int) -> bytes:
        return (await self._stamped(about, start, end))[0]

    async def _stamped(self, about: About, start: int, end: int) -> tuple[bytes, str]:
        response = await self._get(f"bytes={start}-{end - 1}")
        try:
            if response.status == 416:
                raise Missing("it is shorter than it was")
            _check(response, about)
            span = response.headers.get("Content-Range", "").strip()
            is_all = response.status == 200 and (start, end) == (0, about.num_bytes)
            if not is_all and response.status == 200 and about.ranges == "no":
                raise Refused("the server sends no ranges, only whole files")
            if not is_all and (response.status != 206 or not span.startswith(f"bytes {start}-")):
                raise Transient("the server sent another part of the file than it was asked for")
            return await read(response, end - start), _tag(response)
        finally:
            response.close()

    def stamped(self, start: int, end: int) -> tuple[bytes, str]:
        with translate_errors():
            return self.wait(self._stamped(About(None if start else end, "", "no"), start, end))

    async def _get(self, span: str) -> Any:
        session = await self.fs.set_session()
        headers = {**self.fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        headers |= {"Range": span} if span else {}
        response = await session.get(self.fs.encode_url(self.path), **{**self.fs.kwargs, "headers": headers})
        if response.status >= 300 and response.status != 416:  # an empty file has no byte 0
            response.close()
            raise failure_of_status(response.status)
        return response

    def _close(self, response: Any) -> None:
        self.fs.loop.call_soon_threadsafe(response.close)


async def read(response: Any, most_bytes: int) -> bytes:
    """Read `most_bytes` of a body, or fewer before its end or a fault, which is raised only if no bytes came."""
    pieces, missing = list[bytes](), most_bytes
    while missing:
        try:
            piece = await response.content.read(missing)
        except Exception:
            if not pieces:
                raise
            break
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def fingerprint_of(info: dict[str, Any]) -> str:
    """Return what tells an object from its successor, of fsspec's facts; "" if it has none."""
    return next((f"{name}={info[name]}" for name in _FINGERPRINTS if info.get(name)), "")


def _tag(response: Any) -> str:
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def _length(response: Any) -> int | None:
    length = response.headers.get("Content-Length", "")
    is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
    return int(length) if is_plain and length.isdigit() else None


def _check(response: Any, about: About) -> None:
    if about.fingerprint and _tag(response) != about.fingerprint:
        raise Wrong("the file has changed while it was read")


def _spans(begin: int, end: int, *, range_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield several ranges of one size, then of twice that: a single cut must not make the rest of the file slow."""
    while begin < end:
        for _ in range(_RANGES_OF_A_SIZE):
            if begin < end:
                yield begin, min(begin + range_bytes, end)
                begin += range_bytes
        range_bytes = min(2 * range_bytes, RANGE_BYTES)


async def _check_redirect(session: Any, context: Any, redirect: Any) -> None:
    """Refuse redirects to schemes other than http(s), and from another host into this machine or a private network."""
    # Otherwise a server of shards could make this machine request what only it can reach, such as a cloud's metadata at
    # 169.254.169.254. aiohttp follows ten redirects in a row, and sends no credentials to another host.
    url = redirect.url
    headers = redirect.response.headers
    place = url.join(type(url)(headers.get("Location") or headers.get("URI") or ""))  # as aiohttp does
    if place.scheme not in ("http", "https"):
        why = "which is no http or https"
    elif place.host != url.host and await _inner_addresses(place.host) - await _inner_addresses(url.host):
        why = "within this machine or a private network"
    else:
        return
    redirect.response.close()
    raise Refused(f"it redirects to {redact_text(str(place))[:300]}, {why}")


async def _inner_addresses(host: str) -> set[str]:
    """List a host's addresses outside the public internet; none if its name is unknown here."""
    try:
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the request itself will fail, or a proxy knows the name
        return set()
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    inner = [each for each in (getattr(each, "ipv4_mapped", None) or each for each in addresses) if not each.is_global]
    return {"this machine" if each.is_loopback or each.is_unspecified else str(each) for each in inner}
