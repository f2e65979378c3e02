"""Bring weights here by name: `hf-hub:OWNER/NAME[@REVISION]`, or the URL of one file. The seam of huggingface_hub.

A model of the hub comes through huggingface_hub into its cache: config and weights alone, safetensors before torch's
files (read as tensors only), no code. Tokens, endpoint and cache are its own (`hf auth login`, HF_TOKEN, HF_ENDPOINT,
HF_HOME); without network, or with HF_HUB_OFFLINE=1, the cache answers. Other files come as shards do (retried, resumed,
redirects checked), into ~/.cache/shardvit/weights by URL and ETag. Costs a few requests where the cache has it all.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from shardvit.data_shards.durable import locked, replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redact_text, redacted
from shardvit.data_shards.store.download import Downloads, MissingObject, RetryPolicy, StoreError
from shardvit.data_shards.store.remote_errors import Wrong
from shardvit.model.formats.weights_file import SUFFIXES
from shardvit.model.saved.model_folder import CONFIG_FILE

HUB = "hf-hub:"
_SAFE, _BIN = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"), "pytorch_model.bin"
_FILES = (".npz", ".onnx", ".pt2", *SUFFIXES)
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>(?!.*\.\.)[\w./-]+))?", re.ASCII)
_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.\w+$")  # torch.hub's: vit_b_16-c867db91.pth
_TOKEN = re.compile(r"hf_\w{6,}")
_LOGIN = "`hf auth login`, or a token in HF_TOKEN"
_PATIENCE = RetryPolicy(give_up_seconds=20.0)


def is_elsewhere(source: str | Path) -> bool:
    """True for a model of the hub or a URL, which `local_weights` brings here."""
    return re.match(rf"{HUB}|https?:/", str(source)) is not None


def local_weights(source: str | Path) -> Path:
    """Return `source` itself if it is a path, else the folder or file here that the model or URL was brought to.

    UserError, one sentence: it is not there, access is refused, or neither the network nor the cache has it.
    """
    if not is_elsewhere(source):
        return Path(source)
    text = re.sub(r"^(https?):/(?!/)", r"\1://", str(source))  # a Path has dropped the second slash
    return _snapshot(text.removeprefix(HUB)) if text.startswith(HUB) else _file(text)


def name_of(source: Path) -> str:
    """Return the last part of a source without revision, ending, password or signature, to name outputs after."""
    text = str(source)
    return text.rpartition("/")[2].partition("@")[0] if text.startswith(HUB) else Path(urlsplit(text).path).stem


def _snapshot(name: str) -> Path:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"{HUB}{name}: write {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION, as its page's address has it")
    with hub_errors(f"{HUB}{name}", doing="read"):
        from huggingface_hub import snapshot_download

        asked: dict[str, Any] = {"repo_id": match["repository"], "revision": match["revision"]}
        folder = Path(snapshot_download(**asked, allow_patterns=[CONFIG_FILE, *_SAFE]))
        if not _has(folder, *_SAFE):
            folder = Path(snapshot_download(**asked, allow_patterns=[CONFIG_FILE, _BIN]))
    if not _has(folder, CONFIG_FILE):
        raise UserError(f"{HUB}{name} has no {CONFIG_FILE} that says what it is: give the URL of its file of weights")
    if not _has(folder, *_SAFE, _BIN):
        raise UserError(f"{HUB}{name} has no weights that we read: looked for {_SAFE[0]} (or its parts) and {_BIN}")
    return folder


def _has(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(each), None) for each in patterns)


@contextmanager
def hub_errors(where: str, *, doing: str) -> Iterator[None]:
    """Turn whatever huggingface_hub raises into one sentence with its remedy, without tokens; `doing`: read, write."""
    from huggingface_hub import errors, is_offline_mode
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the client's own, its HTTP library's, the disk's
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = without_tokens(redact_text(next(iter(str(error).splitlines()), "")))[:300] or type(error).__name__
        match error:
            case errors.GatedRepoError():
                why = f"is gated: ask for access on its page, then log in as who was granted it ({_LOGIN})"
            case errors.RevisionNotFoundError():
                why = "is not there, though its repository is: give a branch, a tag or a commit of it after the @"
            case errors.RepositoryNotFoundError():
                why = f"is not there, or is private: check the name; for a private one, log in ({_LOGIN})"
            case errors.HFValidationError():
                why = f"is no name that a hub can have: {text}"
            case _ if status in (401, 403):
                why = f"was refused (HTTP status {status}): log in with a token that may {doing} there ({_LOGIN})"
            case _ if is_offline_mode():
                why = "is not whole in the cache, and HF_HUB_OFFLINE is set: unset it, or check HF_HOME"
            case _:
                what = f"HTTP status {status}" if status else text
                cached = " and is not whole in the cache" if doing == "read" else ""
                why = f"cannot be reached ({what}){cached}: check the network and HF_ENDPOINT, and repeat the command"
        raise UserError(f"{where} {why}") from None


def without_tokens(text: str) -> str:
    """Mask what looks like a token of the hub, and the one in use here."""
    from huggingface_hub import get_token

    token = get_token()
    return _TOKEN.sub("...", text.replace(token, "...") if token else text)


def card_header(name: str, *, license: str, data: str, top1: float | None) -> str:
    """Return the YAML with which the hub files a model card; `data` names the held-out set of `top1`."""
    from huggingface_hub import EvalResult, ModelCardData

    metric = {"metric_type": "accuracy", "metric_name": "top-1", "metric_value": top1}
    judged = {"task_type": "image-classification", "dataset_type": "webdataset", "dataset_name": data or "held out"}
    header = ModelCardData(
        license=license,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "transformers", "shardvit"],
        model_name=name.partition("/")[2],
        eval_results=None if top1 is None else [EvalResult(**judged, **metric)],
    )
    return f"---\n{header.to_yaml()}\n---"


def upload(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Make the repository OWNER/NAME unless it is there, and send the folder as one commit; return its address.

    UserError, one sentence: not logged in, not allowed, or no network.
    """
    with hub_errors(f"{HUB}{name}", doing="write"):
        from huggingface_hub import HfApi, get_token

        if get_token() is None:
            raise UserError(f"{HUB}{name}: to write there, log in ({_LOGIN})")
        hub = HfApi()
        hub.create_repo(name, private=private or None, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message).commit_url)


class _OnDisk:
    """A `download.ByteSink`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def begin(self, *, num_bytes: int | None) -> None:
        self._file.seek(0)
        self._file.truncate()

    def write(self, piece: bytes) -> None:
        self._file.write(piece)


def _file(url: str) -> Path:
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not name.endswith(_FILES) or name.startswith("."):
        raise UserError(f"{redacted(url)} is no file of weights: its name should end in {', '.join(_FILES)}")
    identity = re.sub(r"(?<=://)[^/?#]*@", "", url)  # the query stays: it may be all that tells files apart
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardvit" / "weights"
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            return _fetched(url, folder=folder, name=name)
    except OSError as error:
        raise UserError(f"{redacted(url)} cannot be kept in {folder} ({error.strerror}): set XDG_CACHE_HOME") from None


def _fetched(url: str, *, folder: Path, name: str) -> Path:
    """Return the server's file, or the last one kept if the server does not answer."""
    kept = sorted(folder.glob("*/*"), key=lambda path: path.stat().st_mtime)
    from huggingface_hub import is_offline_mode

    if kept and is_offline_mode():
        return kept[-1]
    downloads = Downloads(_PATIENCE)
    try:
        num_bytes, fingerprint = downloads.about(url, patiently=not kept)
    except StoreError as error:
        if not kept or isinstance(error, MissingObject):
            raise
        return kept[-1]
    path = folder / hashlib.sha256(repr((num_bytes, fingerprint)).encode()).hexdigest()[:16] / name
    if path not in kept:
        path.parent.mkdir(exist_ok=True)
        with replaced(path) as beside, beside.open("w+b") as file:

            def verify() -> None:
                file.seek(0)
                said = _DIGEST_IN_NAME.search(name)
                if said and re.search("[a-f]", said[1]):  # without a letter it may be a date
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    if not found.startswith(said[1]):
                        raise Wrong(f"its sha256 digest begins with {found[:8]}, not as its name says")

            downloads.download(url, sink=_OnDisk(file), num_bytes=num_bytes, fingerprint=fingerprint, verify=verify)
    return path
