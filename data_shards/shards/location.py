"""Parse locations of shards (local paths, URLs, `pipe:` commands, patterns), and print them without secrets.

Touches no file or network. A location is a local path (or "file:PATH"), a URL that fsspec opens ("s3://bucket/x.tar"),
or "pipe:COMMAND", whose output is the shard. URLs and commands may hold passwords and signatures: pass everything
printed, logged or stored through `redacted` first.
"""

import math
import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.webdataset_parts import expand_urls

PIPE = "pipe:"
Commands = Literal["run", "refuse"]
# Schemes that only move bytes; fsspec's others may start programs (git, dvc) or execute what a server sends (dask).
_PLAIN = {
    *("file", "local", "memory", "data", "http", "https", "ftp", "sftp", "ssh", "smb", "webdav", "webhdfs", "hdfs"),
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hf", "oci", "oss", "tos", "github", "gist"),
}
_MOST_LOCATIONS = 1_000_000  # in a pattern
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A pipe's program; `NAME=value` before it sets an environment variable, often a secret one.
_PROGRAM = re.compile(r"[\w./+-]+")
_TAR_NAME = re.compile(r"(?:^|[\s'\"/])([\w.+{},-]+\.tar)(?![\w.+{},-])")
# Where a word of a command ends, from coarse to fine: a secret may contain any of these, or be next to them.
_WORD_ENDS = (r"\s+", r"[\s'\"]+", r"[\s'\"=:;|&<>()]+")
# "http://[::1]/x.tar" has a "::" that separates nothing.
_SEPARATOR = re.compile(r"::(?![0-9A-Fa-f:.]*\])")
_NEXT_URL = re.compile(r"::(?=pipe:|[A-Za-z][A-Za-z0-9+.-]*://)")


def protocol(location: str) -> str:
    """The URL's scheme in lower case; "file" for a local path, "pipe" for a command."""
    if location.startswith(PIPE):
        return "pipe"
    match = _SCHEME.match(location)
    return match[1].lower() if match else "file"


def is_local(location: str) -> bool:
    """True for a path on this machine."""
    return protocol(location) == "file"


def command_reason(location: str) -> str | None:
    """Say why reading a location or pattern may run a program; None if it only moves bytes."""
    kinds = [kind for each in expand_braces(location) if (kind := protocol(each)) not in _PLAIN]
    if not kinds:
        return None
    return "is a command" if "pipe" in kinds else f"may start programs, as any {kinds[0]}:// may"


def local_path(location: str) -> Path:
    """Return a local location's path, without "file:" or "file://"."""
    assert is_local(location), redacted(location)
    return Path(re.sub(r"^file:(//)?", "", location))


class CommandRefused(UserError):
    """A location that may run a program, where the caller only inspects."""


def require_no_command(location: str, *, commands: Commands) -> None:
    """CommandRefused if reading `location` may run a program (a pipe, an unknown scheme) and `commands` is "refuse"."""
    if commands == "refuse" and (why := command_reason(location)):
        raise CommandRefused(f"{redacted(location)} {why}: commands run only for training and checking")


def redacted(url: str) -> str:
    """Strip user, password, query and fragment of each URL in a pattern; keep a pipe's program and its tar's name."""
    first, *others = _NEXT_URL.split(url, maxsplit=1)
    return "::".join([_shown_one(first), *map(redacted, others)])


def _shown_one(url: str) -> str:
    if url.startswith(PIPE):
        return _shown_pipe(url.removeprefix(PIPE))
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        return url
    scheme, rest = match[0], url[match.end() :]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        rest = rest[authority.rindex("@") + 1 :]
    elif "@" in rest and re.search(r":(?!\d*$)", authority) and not authority.startswith("["):
        rest = rest.rpartition("@")[2]  # no port follows the colon: a password with a "/", "?" or "#" in it
    return scheme + re.split(r"[?#]", rest, maxsplit=1)[0]


def _shown_pipe(command: str) -> str:
    words = [word for word in command.split() if not re.match(r"\w+=", word)]
    program = words[0] if words and _PROGRAM.fullmatch(words[0]) else ""
    tars = _TAR_NAME.findall(command)
    return " ".join([PIPE + program, "...", *tars[-1:]])


def redact_text(text: str, *, url: str = "") -> str:
    """Redact the URLs in a library's or program's message, and words of `url`: a command's, or user and password."""
    text = re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+", lambda match: redacted(match[0]), text)
    if url.startswith(PIPE):
        allowed = redacted(url).removeprefix(PIPE).split()
        words = {word for pattern in _WORD_ENDS for word in re.split(pattern, url.removeprefix(PIPE))}
        for word in sorted(words, key=len, reverse=True):
            if len(word) >= 6 and not any(word in each for each in allowed):
                text = text.replace(word, "...")
    elif user := re.match(rf"{_SCHEME.pattern}([^/?#]*@)", url):
        text = text.replace(user[2], "")  # s3fs takes it for a part of the bucket's name
    return text


def join(location: str, file: str) -> str:
    """Append `file`, a relative path with "/", to the folder `location`, before any query; UserError for a pipe."""
    kind = protocol(location)
    if kind == "pipe":
        raise UserError(f"{redacted(location)} is a command, not a folder: name the shards themselves, pipe:... each")
    if kind == "file":
        return os.path.join(local_path(location), file)
    match = re.fullmatch(r"([^?#]*)(.*)", location, re.DOTALL)
    assert match is not None
    if kind in ("http", "https"):
        file = quote(file)
    return f"{match[1].rstrip('/')}/{file}{match[2]}"


def expand_braces(pattern: str) -> list[str]:
    """Expand a pattern in webdataset's syntax: "x-{000..127}.tar", "{a,b}.tar", and "::" between patterns.

    Unlike in webdataset, "::" separates nothing in an IPv6 address, nor in a pipe unless another "pipe:" follows.
    UserError for an unmatched brace, ${NAME} without WDS_NAME in the environment, or too many tars.
    """
    separator = re.compile(r"::(?=pipe:)") if pattern.startswith(PIPE) else _SEPARATOR
    locations: list[str] = []
    for part in separator.split(pattern):
        if _most_numbers(part) > _MOST_LOCATIONS:
            raise UserError(f"{redacted(part)}: it stands for more than {_MOST_LOCATIONS:,} tars: name fewer")
        try:
            # Without a brace there is nothing to expand, and backslashes are literal.
            expanded = expand_urls(part) if "{" in part or "}" in part else [part]
        except KeyError as error:
            raise UserError(
                f"{redacted(part)}: set the environment variable {error.args[0]}, or write what it stands for"
            ) from None
        except ValueError:
            raise UserError(f"{redacted(part)}: a brace has no partner; write it like train-{{000..127}}.tar") from None
        if part.startswith("${") and any(map(_SCHEME.match, expanded)):  # whether a path is local depends on its text
            raise UserError(f"{redacted(part)}: write the scheme (such as s3://) before ${{NAME}}, not in the variable")
        locations += expanded
    return locations


def _most_numbers(pattern: str) -> int:
    """Return a lower bound of the number of locations, from its ranges."""
    spans = re.findall(r"\{(-?\d+)\.\.(-?\d+)\}", pattern)
    if any(len(number) > 18 for span in spans for number in span):
        return _MOST_LOCATIONS + 1
    return math.prod(abs(int(last) - int(first)) + 1 for first, last in spans)
