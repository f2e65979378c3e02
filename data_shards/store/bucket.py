"""What S3's protocol can do and fsspec's interface cannot: ranges with a version, uploads in parts, listing pages.

All functions take a `Stored` of s3fs and make one attempt at one request; `download` retries.
"""

from __future__ import annotations

from typing import Any

from shardvit.data_shards.store.remote import Stored
from shardvit.data_shards.store.remote_errors import translate_errors

Listed = tuple[str, int | None, str]  # name, bytes, stamp


def is_bucket(remote: Any) -> bool:
    """True for an object that is reached by S3's protocol."""
    return isinstance(remote, Stored) and "s3" in remote.fs.protocol


def request(remote: Stored, method: str, **options: Any) -> dict[str, Any]:
    """Make a request of boto's client about this object."""
    bucket, key, _ = remote.fs.split_path(remote.path)
    return remote.call("call_s3", method, **{"Bucket": bucket, "Key": key} | options)


def read_stamped(remote: Stored, start: int, end: int) -> tuple[bytes, str]:
    """Read a range and the fingerprint of the object that it is of, in one request."""

    async def read() -> tuple[bytes, str]:
        bucket, key, _ = remote.fs.split_path(remote.path)
        answer = await remote.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        async with answer["Body"] as body:
            return await body.read(), f"ETag={answer['ETag']}"

    with translate_errors():
        return remote.wait(read())


def page(remote: Stored, *, after: str, delimiter: str) -> tuple[list[Listed], list[str], str]:
    """List up to 1,000 objects below the key, by name: the objects, the folders, and where the next page begins."""
    bucket, prefix, _ = remote.fs.split_path(remote.path.rstrip("/") + "/")
    options = {"ContinuationToken": after} if after else {}
    bucket_options = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter}
    found = remote.call("call_s3", "list_objects_v2", **bucket_options, **options)
    files = [
        (each["Key"].removeprefix(prefix), each["Size"], f"ETag={each['ETag']}")
        for each in found.get("Contents", [])
        if not each["Key"].endswith("/")  # what web consoles make for an empty folder
    ]
    folders = [each["Prefix"].removeprefix(prefix) for each in found.get("CommonPrefixes", [])]
    return files, folders, found.get("NextContinuationToken", "")


def unfinished_uploads(remote: Stored) -> list[tuple[str, str]]:
    """List uploads below the key that were neither completed nor aborted, up to 1,000: key and id."""
    bucket, prefix, _ = remote.fs.split_path(remote.path.rstrip("/") + "/")
    found = remote.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return [(each["Key"], each["UploadId"]) for each in found.get("Uploads", [])]
