"""Check an all-reduce of two processes (on this machine only) and MLflow's server."""

import http.client
import statistics
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from shardvit.data_shards.text import show_bytes
from shardvit.launch.doctor.findings import Check, judge
from shardvit.launch.local.env import read_place
from shardvit.pipeline.tracking.facts import without_credentials

ALL_REDUCE_SECONDS = 60.0
_LARGE_VALUES = 4 * 2**20  # 16 MiB of float32, like a gradient bucket
_SMALL_REPEATS, _LARGE_REPEATS = 50, 5
_MLFLOW_SECONDS = 5.0


def all_reduce(backend: str) -> list[Check]:
    """Run in each of the two processes: time an all-reduce of one number and of a gradient bucket."""
    import torch
    from torch import distributed

    from shardvit.pipeline.ranks.group import join_group

    place = read_place()
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_group(place, backend=backend, timeout_seconds=ALL_REDUCE_SECONDS)

    def seconds(values: torch.Tensor) -> float:
        begin = time.perf_counter()
        distributed.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    total = torch.tensor([place.rank + 1.0], device=device)
    distributed.all_reduce(total)
    if total.item() != place.world_size * (place.world_size + 1) / 2:
        raise ArithmeticError(f"the sum came out as {total.item()}")
    small = statistics.median(seconds(torch.ones(1, device=device)) for _ in range(_SMALL_REPEATS))
    large = statistics.median(seconds(torch.ones(_LARGE_VALUES, device=device)) for _ in range(_LARGE_REPEATS))
    distributed.barrier()
    distributed.destroy_process_group()
    return [
        Check(
            f"{place.world_size} processes, {backend}",
            "fine",
            f"all-reduce of one number {small * 1e3:.2g} ms, of 17 MB {show_bytes(4 * _LARGE_VALUES / large)}/s",
        )
    ]


def check_tracking(uri: str | None) -> Check:
    """Check that MLflow's server at `uri` (MLFLOW_TRACKING_URI) answers."""
    name = "MLflow"
    if uri is None:
        return Check(name, "fine", "MLFLOW_TRACKING_URI is not set: runs/mlflow.db is used, a file beside the runs")
    shown = without_credentials(uri)
    parts = urlsplit(uri)
    if parts.scheme in ("", "file") and not shown.startswith(("databricks", "uc")):
        return Check(
            name,
            "problem",
            f"MLFLOW_TRACKING_URI is {shown}",
            "MLflow no longer takes file stores: use sqlite:///FILE, or the address of a server",
        )
    if parts.scheme not in ("http", "https"):
        return Check(name, "fine", f"MLFLOW_TRACKING_URI is {shown}, not a server that can be checked")
    try:
        # Without credentials: urllib would take them for part of the host name.
        status = _status(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/") + "/health")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Check(
            name,
            "problem",
            f"{shown} does not answer: {without_credentials(str(error))}",
            "start the server, correct MLFLOW_TRACKING_URI, or unset it; runs train without it, and send their "
            "metrics later",
        )
    return judge(
        name,
        f"{shown} answers" if status == 200 else f"{shown} answers /health with {status}",
        (
            status in (401, 403),
            "note",
            "it asks for a login: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        ),
        (status != 200, "problem", "correct MLFLOW_TRACKING_URI: that is not an MLflow server"),
    )


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=_MLFLOW_SECONDS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
