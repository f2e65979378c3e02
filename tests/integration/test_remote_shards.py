"""A run from an S3 bucket through a store that fails, with a cache smaller than the data: as if it were local."""

import json
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from tests.data_shards.http_server import FaultServer, serve
from tests.small_recipe import SMALL, curve, small_recipe, small_stage, write_recipe

CACHE_BYTES = 1_000_000
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
# What the requests for one object meet, one after the other, before they are answered as they should be.
FAULTS = (("503",), ("cut:{half}",), ("short:{half}",), ("reset:{half}", "503"), ("garbage",))

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def run(
    run_preloaded: RunCli, name: str, *overrides: str, folder: Path, train: str, held_out: str, **environment: str
) -> Path:
    """Run a small recipe to its end; the folder of its stage."""
    keys = {"duration": "3 epochs", "log_every": "1 steps", "eval_every": "50%", "global_batch_size": 32}
    recipe = small_recipe(
        name,
        model=SMALL | {"depth": 2},
        processes=2,
        engine={"backend": "accelerate", "precision": "fp32"},
        data={"workers": 1, "shuffle_window_images": 30, "lanes": 2},
        finetune_=small_stage(start="scratch", **keys) | {"train": train, "eval": held_out},
    )
    write_recipe(folder / f"{name}.yaml", recipe)
    done = run_preloaded("run", f"{name}.yaml", *overrides, cwd=folder, env=environment, timeout_seconds=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name / "finetune"


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[Path, tuple[str, int]]]:
    """Digits, packed, and the same in a bucket; the store's address."""
    pytest.importorskip("moto")
    import boto3
    from moto.server import ThreadedMotoServer

    pack("digits", tmp_path / "digits", holdout=0.2, samples_per_shard=60, report=lambda line: None)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            region_name=KEYS["AWS_DEFAULT_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="images")
        for file in sorted((tmp_path / "digits").rglob("*")):
            if file.is_file() and file.suffix != ".idx":
                client.upload_file(str(file), "images", f"packed/{file.relative_to(tmp_path / 'digits')}")
        client.close()
        yield tmp_path, (host, port)
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore")
def test_a_run_from_a_failing_bucket_with_a_small_cache_is_the_local_run_to_the_last_digit(
    bucket: tuple[Path, tuple[str, int]], run_preloaded: RunCli
):
    folder, address = bucket
    digits, cache = folder / "digits", folder / "cache"
    local = run(run_preloaded, "local", folder=folder, train=str(digits / "train"), held_out=str(digits / "val"))
    tars = {f"/images/packed/{tar.relative_to(digits)}": tar.stat().st_size for tar in sorted(digits.rglob("*.tar"))}
    assert sum(tars.values()) > 2 * CACHE_BYTES
    # Half of the tars meet a fault, the manifests too.
    faults = {
        path: deque(each.format(half=size // 2) for each in fault)
        for (path, size), fault in zip(tars.items(), cycle((*FAULTS, *[()] * len(FAULTS))), strict=False)
    }
    faults |= {f"/images/packed/{split}/manifest.json": deque(["503"]) for split in ("train", "val")}
    with serve(FaultServer(upstream=address, faults=faults)) as told:
        remote = run(
            run_preloaded,
            "remote",
            f"data.cache.folder={cache}",
            f"data.cache.limit={CACHE_BYTES} B",
            folder=folder,
            train="s3://images/packed/train",
            held_out="s3://images/packed/val",
            AWS_ENDPOINT_URL=told.url,
            **KEYS,
        )
    assert not any(faults.values())  # all have been met
    assert max(told.count(path) for path in tars) > 2  # and tars were fetched again, after they were evicted
    assert curve(remote) == curve(local)
    digests = [json.loads((stage / "stage.json").read_text())["model_digest"] for stage in (local, remote)]
    assert digests[0] == digests[1]
    kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    assert 0 < kept <= CACHE_BYTES
    assert not list(cache.rglob("*.part"))
