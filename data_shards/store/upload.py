"""Upload a file or bytes to a store: whole or not at all, and retried as downloads are.

A bucket gets small objects in one request and large ones in parts of 16 MiB or more, four at a time (64 MiB of
memory), each retried on its own; what fails or is interrupted is aborted. gs and az upload whole objects by their own
clients. Other stores (sftp, smb, hdfs) show a file while it is written: there it gets a hidden name, and is then moved.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardvit.data_shards.store.bucket import is_bucket, request, unfinished_uploads
from shardvit.data_shards.store.download import Downloads, MissingObject, StoreError
from shardvit.data_shards.store.remote import Stored
from shardvit.data_shards.store.remote_errors import Failure, Missing, Transient, Wrong

PART_BYTES = 16 * 2**20
_MOST_PARTS = 10_000
_PARTS_IN_FLIGHT = 4
# Stores where an object appears with its last byte.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "memory"}
WRITABLE = _WHOLE | {"sftp", "ssh", "smb", "ftp", "webdav", "webhdfs", "hdfs"}


def upload_bytes(downloads: Downloads, url: str, data: bytes) -> None:
    """Write an object of at most some MB; StoreError after the last attempt."""

    def attempt(remote: Any) -> None:
        _put(remote, lambda path: remote.call("pipe_file", path, data), num_bytes=len(data))

    downloads.retried(url, attempt, num_bytes=len(data), access="written")


def upload_file(downloads: Downloads, url: str, file: Path) -> None:
    """Upload a file; StoreError after the last attempt."""
    num_bytes = file.stat().st_size

    def attempt(remote: Any) -> None:
        if is_bucket(remote) and num_bytes > 2 * PART_BYTES:
            _upload_parts(downloads, url, remote, file)
            _demand_size(remote, num_bytes)
        else:
            _put(remote, lambda path: remote.call("put_file", str(file), path), num_bytes=num_bytes)

    downloads.retried(url, attempt, num_bytes=num_bytes, access="written")


def remove(downloads: Downloads, url: str) -> None:
    """Remove an object; missing is fine."""
    with suppress(MissingObject):
        downloads.retried(url, lambda remote: remote.call("rm_file", remote.path), access="written")


def abort_unfinished(downloads: Downloads, url: str) -> None:
    """Abort uploads below a bucket's URL whose process was killed: they cost money and are invisible.

    Nobody may be writing there. A bucket that does not let us list them keeps them.
    """

    def attempt(remote: Any) -> None:
        uploads = unfinished_uploads(remote) if is_bucket(remote) else []
        for key, upload_id in uploads:
            with suppress(Missing):  # completed or aborted by now
                request(remote, "abort_multipart_upload", Key=key, UploadId=upload_id)

    with suppress(StoreError):
        downloads.retried(url, attempt, access="written", patiently=False)


def _put(remote: Any, write: Callable[[str], object], *, num_bytes: int) -> None:
    if remote.kind in _WHOLE:
        write(remote.path)
        _demand_size(remote, num_bytes)
        return
    folder, _, name = remote.path.rpartition("/")
    remote.call("makedirs", folder, exist_ok=True)
    beside = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    try:
        write(beside)
        if (written := remote.call("info", beside)["size"]) != num_bytes:
            raise Transient(f"{written} of {num_bytes} bytes were written")
        try:
            remote.call("mv", beside, remote.path)
        except Failure:
            remote.call("rm_file", remote.path)  # some refuse to replace a file
            remote.call("mv", beside, remote.path)
    except BaseException:
        with suppress(Failure):  # the first error says more
            remote.call("rm_file", beside)
        raise


def _demand_size(remote: Any, num_bytes: int) -> str:
    """Return the object's fingerprint; a Failure if its size is another."""
    try:
        about = remote.about()
    except Missing:
        raise Transient("it is not there after its upload") from None
    if about.num_bytes != num_bytes:
        raise Wrong(f"it has {about.num_bytes} bytes after its upload where {num_bytes} were sent")
    return about.fingerprint


def _upload_parts(downloads: Downloads, url: str, remote: Stored, file: Path) -> None:
    interrupted = threading.Event()
    num_bytes = file.stat().st_size
    part_bytes = max(PART_BYTES, -(-num_bytes // _MOST_PARTS))

    def ask(method: str, **options: Any) -> dict[str, Any]:
        attempt = partial(request, method=method, **options)
        return downloads.retried(url, attempt, num_bytes=part_bytes, access="written", stop=interrupted.is_set)

    def send(number: int) -> dict[str, str | int]:
        with file.open("rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), part_bytes, (number - 1) * part_bytes)
        answer = ask("upload_part", UploadId=upload_id, PartNumber=number, Body=data)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    upload_id = ask("create_multipart_upload")["UploadId"]
    parts = list[dict[str, str | int]]()
    try:
        with ThreadPoolExecutor(_PARTS_IN_FLIGHT) as pool:
            try:
                parts += pool.map(send, range(1, -(-num_bytes // part_bytes) + 1))
            except BaseException:
                interrupted.set()  # ends requests under way within 0.1 s
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        ask("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})
    except MissingObject:  # the upload is gone: it was aborted, or completed and the answer was lost
        if _demand_size(remote, num_bytes) != _fingerprint_of_parts(parts):
            raise Transient("its upload was aborted by another process") from None
    except BaseException as error:
        interrupted.clear()
        with suppress(StoreError):
            abort = partial(request, method="abort_multipart_upload", UploadId=upload_id)
            downloads.retried(url, abort, access="written", patiently=isinstance(error, Exception))
        raise


def _fingerprint_of_parts(parts: list[dict[str, str | int]]) -> str:
    """Fingerprint of an object made of these parts; "" in stores with tags of another kind."""
    try:
        tags = b"".join(bytes.fromhex(str(part["ETag"]).strip('"')) for part in parts)
    except ValueError:
        return ""
    return f'ETag="{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"'
