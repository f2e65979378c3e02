"""One HTTP request through the session of fsspec's HTTP file system, and what its answer says; on its event loop."""

from __future__ import annotations

import re
from typing import Any

from data_shards.store.remote_errors import Transient, of_status

HTTP_PIECE_BYTES = 2**20


async def get(file_system: Any, url: str, headers: dict[str, str], allow: tuple[int, ...] = ()) -> Any:
    """An answer, its body still to come; a `Failure` for a status of 400 or more that is not in `allow`."""
    session = await file_system.set_session()
    options = {**file_system.kwargs, "headers": {**file_system.kwargs.get("headers", {}), **headers}}
    response = await session.get(file_system.encode_url(url), **options)
    if response.status >= 400 and response.status not in allow:
        response.close()
        raise of_status(response.status)
    return response


async def get_first(file_system: Any, url: str, headers: dict[str, str]) -> tuple[Any, bytes]:
    """A response and its first piece, b"" where a fault came before it: read at once, because what lies in the client's
    buffer when the connection ends is lost.
    """
    response = await get(file_system, url, headers)
    try:
        return response, await read(response, HTTP_PIECE_BYTES)
    except Exception:  # noqa: BLE001 - it comes again when the next piece is asked for
        return response, b""
    except BaseException:
        response.close()
        raise


async def read(response: Any, most_bytes: int) -> bytes:
    """A full piece, or what comes before the end or a fault; b"" at the end."""
    parts, num_bytes = [], 0
    while num_bytes < most_bytes:
        try:
            part = await response.content.read(most_bytes - num_bytes)
        except Exception:
            if not parts:
                raise  # as it does again when the next piece is asked for
            break
        if not part:
            break
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts)


def span_of(response: Any) -> tuple[int, int | None]:
    """(offset of the body in the file, size of the file) of an HTTP response."""
    if response.status in (206, 416):
        match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if match is None:
            raise Transient("the server answered with a part of the file and does not say which")
        return int(match[1] or 0), None if match[2] == "*" else int(match[2])
    length = response.headers.get("Content-Length", "")
    is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
    return 0, int(length) if is_plain and length.isdigit() else None


def fingerprint_of(response: Any) -> str:
    """What changes with the file; "" where the server does not say."""
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
