"""Bytes from elsewhere, one attempt at a time: HTTP, fsspec's other stores, and the output of commands.

HTTP(S) is one streamed GET through the session of fsspec's HTTP file system, or one for each range where ranges are
asked for. Other stores (s3, gs, abfs, hf, ...) are read in ranges of 8 MiB, four at a time where fsspec has them
asynchronous: one stream alone rarely fills a network card. A `pipe:` command runs in a shell. Nothing is tried twice
here (see `download`), nothing is kept (see `cache`).

Settings of a store are fsspec's own, from the environment or ~/.config/fsspec/*.json: `AWS_ENDPOINT_URL` or
`FSSPEC_S3_ENDPOINT_URL` for MinIO and the like, `FSSPEC_S3_ANON=true` for public buckets without credentials,
`FSSPEC_S3='{"profile": "x"}'` for anything else; HTTP takes passwords from the URL or ~/.netrc and proxies from the
environment. File systems are made in the process that uses them, never shared with a fork or pickled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections import deque
from collections.abc import Coroutine, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from data_shards.errors import UserError
from data_shards.store.location import Commands, demand_no_command, protocol, scrubbed, shown
from data_shards.store.remote_errors import Missing, Refused, Stop, Stopped, Transient, Wrong, translated
from data_shards.store.remote_http import HTTP_PIECE_BYTES, fingerprint_of, get, get_first, read, span_of

Result = TypeVar("Result")
Proof = Literal["fingerprint", "digest"]

RANGE_BYTES = 8 * 2**20
_RANGES_OF_A_SIZE = 4
_MOST_HTTP_RANGE_BYTES = 64 * 2**20
_RANGES_IN_FLIGHT = 4
# A server that sends, but less than this on average over a piece, counts as stalled.
_LEAST_BYTES_PER_SECOND = 100_000
_POLL_SECONDS = 0.1

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
}


@dataclass(frozen=True)
class Stream:
    """One attempt to read an object.

    Args:
        offset: where in the object the first piece begins; 0 where the store could not go on at the wanted one.
        num_bytes: the whole object's size; None where it is unknown.
        fingerprint: changes with the object; "" where it is unknown.
        pieces: the bytes, at most 8 MiB at once. Closing it ends the transfer.
    """

    offset: int
    num_bytes: int | None
    fingerprint: str
    pieces: Iterator[bytes]


class Remotes:
    """All remote places, by URL; picklable.

    Args:
        connect_seconds: for a server to accept a connection.
        stall_seconds: without a byte, until a transfer counts as lost.
        commands: whether what may run a program is opened; see `location.demand_no_command`.
    """

    def __init__(self, *, connect_seconds: float, stall_seconds: float, commands: Commands = "refuse") -> None:
        self._commands: Commands = commands
        self._connect_seconds = connect_seconds
        self._stall_seconds = stall_seconds
        self._file_systems: dict[tuple[object, ...], Any] = {}

    def __getstate__(self) -> dict[str, object]:
        """Without file systems: their sockets and threads belong to this process."""
        return {**vars(self), "_file_systems": {}}

    def open(
        self,
        url: str,
        *,
        offset: int = 0,
        fingerprint: str = "",
        proof: Proof = "fingerprint",
        range_bytes: int | None = None,
        stop: Stop = lambda: False,
    ) -> Stream:
        """Begin to read `url`, at `offset` if the object still has this `fingerprint` and the store can do that.

        Args:
            url: what to read.
            offset: of the first byte that is wanted.
            fingerprint: that the object had when the bytes before `offset` were read.
            proof: that bytes of two requests are of the same object: the fingerprint alone, which must be a strong one
                then, or a digest that the caller checks.
            range_bytes: ask for no more at once, where that is possible, until several such ranges have come; None: as
                suits the store.
            stop: asked several times a second.

        Raises:
            Failure: one of its kinds; also while iterating over the pieces.
            Stopped: `stop` said so; also while iterating.
            UserError: the package for this kind of URL is not installed, or it may run a program and shall not.
        """
        demand_no_command(url, commands=self._commands)
        kind = protocol(url)
        if kind == "pipe":
            from data_shards.store.remote_pipe import open_pipe

            return Stream(0, None, "", open_pipe(url, stall_seconds=self._stall_seconds, stop=stop))
        file_system = self._file_system(url)
        if kind in ("http", "https"):
            is_strong = proof == "digest" or fingerprint.startswith('"')  # a strong ETag: the same one, the same bytes
            if not fingerprint or not is_strong:
                offset, range_bytes = 0, None
            return self._open_http(
                file_system, url, offset=offset, fingerprint=fingerprint, range_bytes=range_bytes, stop=stop
            )
        return self._open_ranges(
            file_system,
            url,
            offset=offset,
            fingerprint=fingerprint,
            range_bytes=min(RANGE_BYTES, range_bytes or RANGE_BYTES),
            stop=stop,
        )

    def about(self, url: str, *, stop: Stop = lambda: False) -> tuple[int | None, str]:
        """Size (None: unknown) and fingerprint ("": unknown); raises as `open` does."""
        if protocol(url) == "pipe":
            return None, ""
        demand_no_command(url, commands=self._commands)
        if protocol(url) in ("http", "https"):
            # A HEAD request would be refused where a signature in the URL allows GET alone.
            return self._http_about(self._file_system(url), url, stop=stop)
        return self._info(self._file_system(url), url, stop=stop)

    # ---- HTTP -------------------------------------------------------------------------------------------------------

    def _open_http(
        self, file_system: Any, url: str, *, offset: int, fingerprint: str, range_bytes: int | None, stop: Stop
    ) -> Stream:
        sizes = _sizes(range_bytes, most_bytes=_MOST_HTTP_RANGE_BYTES) if range_bytes else None
        response, pieces, begin, num_bytes, found = self._ask_http(
            file_system,
            url,
            offset=offset,
            fingerprint=fingerprint,
            range_bytes=next(sizes) if sizes else None,
            stop=stop,
        )
        if sizes and response.status == 206 and num_bytes is not None:
            pieces = self._http_ranges(
                file_system, url, pieces, stream=(begin, num_bytes, found), sizes=sizes, stop=stop
            )
        return Stream(begin, num_bytes, found, pieces)

    def _ask_http(
        self, file_system: Any, url: str, *, offset: int, fingerprint: str, range_bytes: int | None, stop: Stop
    ) -> tuple[Any, Generator[bytes, None, None], int, int | None, str]:
        """(response, its bytes, where they begin, size of the file, fingerprint) of one request."""
        headers = {"Accept-Encoding": "identity"}
        if offset or range_bytes:
            headers["Range"] = f"bytes={offset}-{offset + range_bytes - 1 if range_bytes else ''}"
            if fingerprint.startswith('"'):
                headers["If-Range"] = fingerprint
        with translated():
            response, piece = self._wait(get_first(file_system, url, headers), file_system.loop, stop=stop)
            try:
                begin, num_bytes = span_of(response)
                if begin != (offset if "Range" in headers and response.status == 206 else 0):
                    raise Transient("the server sent another part of the file than it was asked for")
                found = fingerprint_of(response)
                if begin and found != fingerprint:  # it knows Range, but not If-Range
                    raise Wrong("the file has changed while it was read")
            except BaseException:
                file_system.loop.call_soon_threadsafe(response.close)
                raise
        return response, self._http_pieces(file_system, response, piece, stop=stop), begin, num_bytes, found

    def _http_pieces(
        self, file_system: Any, response: Any, piece: bytes, *, stop: Stop
    ) -> Generator[bytes, None, None]:
        try:
            while True:
                if piece:
                    yield piece
                with translated():
                    piece = self._wait(read(response, HTTP_PIECE_BYTES), file_system.loop, stop=stop)
                if not piece:
                    return
        finally:
            file_system.loop.call_soon_threadsafe(response.close)

    def _http_ranges(
        self,
        file_system: Any,
        url: str,
        pieces: Generator[bytes, None, None],
        *,
        stream: tuple[int, int, str],
        sizes: Iterator[int],
        stop: Stop,
    ) -> Generator[bytes, None, None]:
        """The range whose `pieces` are on their way, and those after it; the session keeps the connection."""
        at, num_bytes, found = stream
        while True:
            begin = at
            with closing(pieces):
                for piece in pieces:
                    yield piece
                    at += len(piece)
            if at >= num_bytes:
                return
            if at == begin:
                raise Transient("the server sent nothing of the part that it was asked for")
            response, pieces, *following = self._ask_http(
                file_system, url, offset=at, fingerprint=found, range_bytes=min(next(sizes), num_bytes - at), stop=stop
            )
            if following != [at, num_bytes, found]:  # the next attempt begins anew
                file_system.loop.call_soon_threadsafe(response.close)
                raise Transient("the server does not go on where it was")

    def _http_about(self, file_system: Any, url: str, *, stop: Stop) -> tuple[int | None, str]:
        with translated():
            headers = {"Accept-Encoding": "identity", "Range": "bytes=0-0"}
            response = self._wait(get(file_system, url, headers, allow=(416,)), file_system.loop, stop=stop)
            file_system.loop.call_soon_threadsafe(response.close)
            return span_of(response)[1], fingerprint_of(response)

    # ---- the other stores of fsspec ---------------------------------------------------------------------------------

    def _open_ranges(
        self, file_system: Any, url: str, *, offset: int, fingerprint: str, range_bytes: int, stop: Stop
    ) -> Stream:
        num_bytes, found = self._info(file_system, url, stop=stop)
        if num_bytes is None:
            raise Refused("the store does not tell its size")
        begin = offset if found and found == fingerprint else 0
        pieces = self._range_pieces(
            file_system, url, begin=begin, stream=(num_bytes, found), range_bytes=range_bytes, stop=stop
        )
        return Stream(begin, num_bytes, found, pieces)

    def _range_pieces(
        self, file_system: Any, url: str, *, begin: int, stream: tuple[int, str], range_bytes: int, stop: Stop
    ) -> Iterator[bytes]:
        num_bytes, found = stream
        path = file_system._strip_protocol(url)
        spans = _spans(begin, num_bytes, sizes=_sizes(range_bytes, most_bytes=RANGE_BYTES))
        running: deque[tuple[int, concurrent.futures.Future[bytes]]] = deque()
        try:
            while True:
                with translated():
                    while file_system.async_impl and len(running) < _RANGES_IN_FLIGHT:
                        span = next(spans, None)
                        if span is None:
                            break
                        coroutine = file_system._cat_file(path, start=span[0], end=span[1])
                        running.append(
                            (span[1] - span[0], asyncio.run_coroutine_threadsafe(coroutine, file_system.loop))
                        )
                    if running:
                        wanted, future = running.popleft()
                        piece = self._result(future, stop=stop)
                    else:
                        span = next(spans, None)
                        if span is None:
                            break
                        if stop():
                            raise Stopped
                        wanted, piece = span[1] - span[0], file_system.cat_file(path, start=span[0], end=span[1])
                if len(piece) != wanted:
                    raise Transient(f"{len(piece)} bytes came where {wanted} were asked for")
                yield piece
        finally:
            for _, future in running:
                future.cancel()
        # The ranges may be of different objects if it was replaced meanwhile.
        if self._info(file_system, url, stop=stop) != (num_bytes, found):
            raise Wrong("it was replaced while it was read")

    def _info(self, file_system: Any, url: str, *, stop: Stop) -> tuple[int | None, str]:
        path = file_system._strip_protocol(url)
        with translated():
            if file_system.async_impl:
                info = self._wait(file_system._info(path), file_system.loop, stop=stop)
            else:
                info = file_system.info(path)
        if info.get("type") == "directory":
            raise Missing("it is a folder")
        for name in ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "updated"):
            if info.get(name):
                return info.get("size"), f"{name}={info[name]}"
        return info.get("size"), ""

    # ---- file systems and their event loop --------------------------------------------------------------------------

    def _file_system(self, url: str) -> Any:
        """The file system for a URL: one for each process and kind of URL, made when it is first needed."""
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
                    self._file_systems[key].retries = 1  # trying again is `download`'s business
        except ImportError as error:
            package = _PACKAGES.get(kind) or "the package that fsspec asks for"
            raise UserError(
                f"{shown(url)}: for {kind}:// a package is missing: pip install {package} ({error})"
            ) from None
        except ValueError as error:
            raise UserError(f"{shown(url)}: {scrubbed(str(error))}: check the part before ://") from None
        return self._file_systems[key]

    def _options(self, kind: str, configured: dict[str, Any]) -> dict[str, Any]:
        """Timeouts and the like, below what the user has configured."""
        if kind in ("http", "https"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=self._connect_seconds, sock_read=self._stall_seconds)
            client = {"timeout": timeout, "trust_env": True}  # proxies and ~/.netrc
            return {"client_kwargs": {**client, **configured.get("client_kwargs", {})}}
        if kind in ("s3", "s3a"):
            config = {
                "connect_timeout": self._connect_seconds,
                "read_timeout": self._stall_seconds,
                "retries": {"total_max_attempts": 1},
            }
            return {"config_kwargs": {**config, **configured.get("config_kwargs", {})}}
        return {}

    def _wait(self, coroutine: Coroutine[Any, Any, Result], loop: Any, *, stop: Stop) -> Result:
        return self._result(asyncio.run_coroutine_threadsafe(coroutine, loop), stop=stop)

    def _result(self, future: concurrent.futures.Future[Result], *, stop: Stop) -> Result:
        deadline = time.monotonic() + self._connect_seconds + self._stall_seconds
        deadline += _RANGES_IN_FLIGHT * RANGE_BYTES / _LEAST_BYTES_PER_SECOND
        try:
            while not concurrent.futures.wait([future], timeout=_POLL_SECONDS).done:
                if stop():
                    raise Stopped
                if time.monotonic() > deadline:
                    raise Transient("the server hardly sends anything")
            return future.result()
        finally:
            future.cancel()


def _sizes(range_bytes: int, *, most_bytes: int) -> Iterator[int]:
    """Several ranges of a size, then of twice that: a single cut must not make the rest of the file slow."""
    while True:
        yield from [range_bytes] * _RANGES_OF_A_SIZE
        range_bytes = min(2 * range_bytes, most_bytes)


def _spans(begin: int, end: int, *, sizes: Iterator[int]) -> Iterator[tuple[int, int]]:
    while begin < end:
        following = min(begin + next(sizes), end)
        yield begin, following
        begin = following
