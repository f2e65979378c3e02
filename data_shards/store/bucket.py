"""S3's protocol beyond fsspec's interface: a range with its ETag, listings page by page, unfinished uploads.

Each function makes one attempt at one request; `download` retries.
"""

from typing import Any, TypeGuard

from shardvit.data_shards.store.remote import Stored
from shardvit.data_shards.store.remote_errors import translate_errors

Listed = tuple[str, int | None, str]  # name, bytes, stamp


def is_bucket(remote: Any) -> TypeGuard[Stored]:
    """True for an object that is reached by S3's protocol."""
    return isinstance(remote, Stored) and "s3" in remote.fs.protocol


def read_stamped(remote: Stored, start: int, end: int) -> tuple[bytes, str]:
    """Read a range, and the fingerprint of the object that it is of."""
    bucket, key, _ = remote.fs.split_path(remote.path)

    async def read() -> tuple[bytes, str]:
        answer = await remote.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        async with answer["Body"] as body:
            return await body.read(), f"ETag={answer['ETag']}"

    with translate_errors():
        return remote.wait(read())


def page(remote: Stored, *, after: str, delimiter: str) -> tuple[list[Listed], list[str], str]:
    """List up to 1,000 objects below the key, by name: the objects, the folders, and where the next page begins."""
    bucket, key, _ = remote.fs.split_path(remote.path)
    prefix = f"{key}/" if key else ""
    options = {"ContinuationToken": after} if after else {}
    found = remote.call("call_s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **options)
    objects = [each for each in found.get("Contents", []) if not each["Key"].endswith("/")]  # a console's empty folder
    files = [(each["Key"].removeprefix(prefix), each["Size"], f"ETag={each['ETag']}") for each in objects]
    folders = [each["Prefix"].removeprefix(prefix) for each in found.get("CommonPrefixes", [])]
    return files, folders, found.get("NextContinuationToken", "")


def unfinished_uploads(remote: Stored) -> list[dict[str, str]]:
    """List uploads to the key, or below it, that were neither completed nor aborted: up to 1,000, in boto's words."""
    bucket, key, _ = remote.fs.split_path(remote.path)
    found = remote.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", [])
    ours = [each for each in found if not key or each["Key"] == key or each["Key"].startswith(f"{key}/")]
    return [{"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]} for each in ours]
