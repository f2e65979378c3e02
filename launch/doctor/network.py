"""Processes that talk: an all-reduce of two, on gloo and where there are GPUs for it on NCCL; and MLflow's server.

The two are real processes, as `shardvit run` starts them. They share this machine: what is between machines shows only
in a job on several of them.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from data_shards.text import show_bytes
from launch.doctor.all_reduce import LIMIT_SECONDS
from launch.doctor.child import Answer, run_children
from launch.doctor.result import Check
from launch.env import RENDEZVOUS
from pipeline.report.tracking_thread import without_credentials

_WORLD = 2
_COMMAND = (sys.executable, "-m", "launch.doctor.all_reduce")
_MLFLOW_SECONDS = 5.0
_ADVICE = {
    "gloo": "gloo asks for the address of this machine's own name: put the name into /etc/hosts, or set "
    "GLOO_SOCKET_IFNAME to an interface (ip -br address lists them)",
    "nccl": "set NCCL_DEBUG=INFO and look at what it says; in a container give it more /dev/shm",
}
# What a file: store is refused with; a name without a scheme is one too.
_NO_STORE = "MLflow takes no file stores any more: use sqlite:///FILE, or the address of a server"


def check_all_reduce(
    backend: Literal["gloo", "nccl"],
    *,
    environment: Mapping[str, str],
    command: Sequence[str] = _COMMAND,
    limit_seconds: float = LIMIT_SECONDS + 30,
) -> Check:
    """Two processes that add numbers up; `environment` names no other launcher's place (`launch.env.without_place`)."""
    with tempfile.TemporaryDirectory(prefix="shardvit-doctor-") as folder:
        places = [
            {
                **environment,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_WORLD)},
                **{"LOCAL_WORLD_SIZE": str(_WORLD), RENDEZVOUS: folder},
            }
            for rank in range(_WORLD)
        ]
        answers = run_children([[*command, backend]] * _WORLD, environments=places, limit_seconds=limit_seconds)
    return judge_all_reduce(backend, answers)


def judge_all_reduce(backend: Literal["gloo", "nccl"], answers: Sequence[Answer]) -> Check:
    """The verdict on what became of the processes."""
    name = f"{_WORLD} processes, {backend}"
    failed = [(rank, answer) for rank, answer in enumerate(answers) if not answer.is_success]
    if failed:
        # Who was killed for want of the other is not the one to name.
        rank, answer = min(failed, key=lambda each: each[1].code is None)
        return Check(name, "problem", f"all-reduce: process {rank} {answer.ending}", _ADVICE[backend])
    [facts] = answers[0].messages
    return Check(
        name,
        "fine",
        f"all-reduce of one number {facts['latency_seconds'] * 1e3:.2g} ms, of 17 MB "
        f"{show_bytes(facts['bytes_per_second'])}/s",
    )


def check_tracking(uri: str | None, *, get: Callable[[str], int] | None = None) -> Check:
    """Whether MLflow's server answers.

    Args:
        uri: MLFLOW_TRACKING_URI.
        get: the status of a GET of a URL.
    """
    name = "MLflow"
    if uri is None:
        return Check(name, "fine", "MLFLOW_TRACKING_URI is not set: runs/mlflow.db is used, a file beside the runs")
    shown = without_credentials(uri)
    scheme = uri.partition("://")[0] if "://" in uri else uri.partition(":")[0] if ":" in uri else ""
    if scheme in ("", "file") and not shown.startswith(("databricks", "uc")):
        return Check(name, "problem", f"MLFLOW_TRACKING_URI is {shown}", _NO_STORE)
    if scheme not in ("http", "https"):
        return Check(name, "fine", f"MLFLOW_TRACKING_URI is {shown}, which is no server that could be asked")
    try:
        status = (get or _status)(f"{uri.rstrip('/')}/health")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Check(
            name,
            "problem",
            f"{shown} does not answer: {without_credentials(str(error))}",
            "start the server, correct MLFLOW_TRACKING_URI, or unset it; runs go on all the same, and send what is "
            "missing later",
        )
    if status in (401, 403):
        return Check(
            name,
            "note",
            f"{shown} answers with {status}",
            "it wants to know who asks: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN",
        )
    if status != 200:
        return Check(
            name, "problem", f"{shown}/health answers with {status}", "correct MLFLOW_TRACKING_URI: that is no MLflow"
        )
    return Check(name, "fine", f"{shown} answers")


def _status(url: str) -> int:
    # MLflow itself sends credentials that stand in a URL; urllib would take them for a part of the host's name.
    request = urllib.request.Request(_without_user(url))
    try:
        with urllib.request.urlopen(request, timeout=_MLFLOW_SECONDS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def _without_user(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
