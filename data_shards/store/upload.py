"""Upload a file or bytes to a store: whole or not at all, and retried as downloads are.

A bucket gets small objects in one request and large ones in parts of 16 MiB, four at a time (64 MiB of memory), each
retried by boto; what fails or is interrupted is aborted. gs and az upload whole objects by their own clients. Other
stores (sftp, smb, hdfs) show a file while it is written: there it gets a hidden name, and is then moved.
"""

import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardvit.data_shards.store.bucket import is_bucket, unfinished_uploads
from shardvit.data_shards.store.download import Downloads, MissingObject, RetryPolicy, StoreError
from shardvit.data_shards.store.remote_errors import Failure, Missing, Refused, Transient, Wrong

UPLOADS = Downloads(RetryPolicy(), requests=6)  # beside the retries of the whole upload
PART_BYTES = 16 * 2**20
_PARTS_IN_FLIGHT = 4
_MOST_PARTS = 10_000
# Stores where an object appears with its last byte.
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "memory"}
WRITABLE = _WHOLE | {"sftp", "ssh", "smb", "ftp", "webdav", "webhdfs", "hdfs"}


def upload(url: str, data: bytes | Path) -> None:
    """Write an object from memory or a file; StoreError after the last attempt."""
    num_bytes = len(data) if isinstance(data, bytes) else data.stat().st_size
    try:
        UPLOADS.retried(url, lambda remote: _put(remote, data, num_bytes), num_bytes=num_bytes, access="written")
    except BaseException:
        abort_unfinished(url)
        raise


def claim(url: str, data: bytes) -> None:
    """Write a small object unless there is one: of several writers at once one wins (where a store knows no condition,
    the last); StoreError after the last attempt."""

    def attempt(remote: Any) -> None:
        if remote.kind not in _WHOLE:
            remote.call("makedirs", remote.path.rpartition("/")[0], exist_ok=True)
        try:
            remote.call("pipe_file", remote.path, data, mode="create")
        except Failure as failure:
            with suppress(Missing):
                remote.call("info", remote.path)
                return
            if not isinstance(failure, Refused):
                raise
            remote.call("pipe_file", remote.path, data)

    UPLOADS.retried(url, attempt, num_bytes=len(data), access="written")


def count_requests(num_bytes: int) -> int:
    """Count the PUTs and POSTs with which a bucket gets an object: beginning and end of one in parts are two."""
    return 1 if num_bytes < 2 * PART_BYTES else 2 + -(-num_bytes // max(PART_BYTES, -(-num_bytes // _MOST_PARTS)))


def remove(url: str) -> None:
    """Remove an object; missing is fine."""
    with suppress(MissingObject):
        UPLOADS.retried(url, lambda remote: remote.call("rm_file", remote.path), access="written")


def abort_unfinished(url: str) -> None:
    """Abort uploads to an object, or below a folder, whose process was killed: they are invisible and cost money.

    If another process is uploading there, it begins again. Without the right to list them they stay.
    """

    def attempt(remote: Any) -> None:
        for upload in unfinished_uploads(remote) if is_bucket(remote) else []:
            with suppress(Missing):  # completed or aborted by now
                remote.call("call_s3", "abort_multipart_upload", **upload)

    with suppress(StoreError):
        UPLOADS.retried(url, attempt, access="written", patiently=False)


def _put(remote: Any, data: bytes | Path, num_bytes: int) -> None:
    """Make one attempt."""
    if remote.kind in _WHOLE:
        try:
            return _write(remote, data, remote.path, num_bytes)
        except Missing:
            if is_bucket(remote) and count_requests(num_bytes) > 1:
                raise Transient("another process aborted the upload") from None
            raise
    folder, _, name = remote.path.rpartition("/")
    remote.call("makedirs", folder, exist_ok=True)
    beside = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    try:
        _write(remote, data, beside, num_bytes)
        try:
            remote.call("mv", beside, remote.path)
        except Failure:
            remote.call("rm_file", remote.path)  # some do not replace files
            remote.call("mv", beside, remote.path)
    except BaseException:
        with suppress(Failure):  # the first error says more
            remote.call("rm_file", beside)
        raise


def _write(remote: Any, data: bytes | Path, path: str, num_bytes: int) -> None:
    if isinstance(data, bytes):
        remote.call("pipe_file", path, data)
    else:
        part_bytes = max(PART_BYTES, -(-num_bytes // _MOST_PARTS))
        options = {"chunksize": part_bytes, "max_concurrency": _PARTS_IN_FLIGHT} if is_bucket(remote) else {}
        remote.call("put_file", str(data), path, **options)
    found = remote.call("info", path)["size"]
    if found != num_bytes:
        raise Wrong(f"it has {found} bytes after its upload where {num_bytes} were sent")
