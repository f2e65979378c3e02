"""Classify failed remote reads: exceptions of many libraries -> four kinds of `Failure`, with printable reasons."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redact_text

Stop = Callable[[], bool]

# No base class of botocore's or aiohttp's errors tells settings from the network.
_SETTINGS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidURL"}
_SETTINGS |= {"RedirectClientError", "ClientConnectorCertificateError"}
# Of S3, where s3fs has the errno of a refusal: the bytes were damaged or cut on their way.
_DAMAGED = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
# s3fs raises these for answers like "malformed" and "method not allowed".
_REFUSALS = {errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENAMETOOLONG}


class Failure(Exception):
    """An attempt failed; `str(error)` is the printable reason."""


class Missing(Failure):
    """There is no such object."""


class Refused(Failure):
    """Credentials, settings or the location are wrong: a retry does not help."""


class Transient(Failure):
    """The network or the server failed: a retry may help."""


class Wrong(Failure):
    """The bytes are not the expected ones, or a command failed: a retry rarely helps."""


class DownloadStopped(Exception):
    """The caller's `stop` returned True."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn a library's exception into a `Failure`; not chained, since its text may hold a URL with a password."""
    try:
        yield
    except (Failure, DownloadStopped, UserError):
        raise
    except Exception as error:  # noqa: BLE001 - each library has a hundred of its own
        raise failure_of(error) from None


def failure_of(error: Exception) -> Failure:
    """Classify an exception of a library."""
    names = {each.__name__ for each in type(error).__mro__}
    if "TooManyRedirects" in names:
        return Refused("it redirects again and again")
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(status, int) and 400 <= status < 600:
        return failure_of_status(status)
    text = redact_text(" ".join(str(error).split()))[:300]
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else ""
    if code in _DAMAGED:
        return Transient(reason)
    if code == "InvalidRange":
        return Missing("it is shorter than it was")
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return Missing(reason)
    if "ClientPayloadError" in names:
        return Transient("the connection was cut")
    if names & _SETTINGS or (isinstance(error, OSError) and error.errno in _REFUSALS):
        return Refused(reason)
    # Some of aiohttp's connection errors are also ValueErrors.
    if isinstance(error, PermissionError | TypeError | ValueError | AttributeError) and "ClientError" not in names:
        return Refused(reason)
    return Transient(reason)


def failure_of_status(status: int) -> Failure:
    """Classify an HTTP status of 300 or more, including a redirect that leads nowhere."""
    if status in (404, 410):
        return Missing(f"HTTP status {status}")
    if status in (408, 425, 429) or (status >= 500 and status not in (501, 505)):
        return Transient(f"HTTP status {status}")
    return Refused(f"HTTP status {status}")
