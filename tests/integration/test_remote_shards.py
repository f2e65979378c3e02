"""A run from an S3 bucket through a store that fails, with a cache smaller than the data: as if it were local."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from data_shards.packing.pack import pack
from pipeline.metrics_log import read_metrics
from tests.integration.faulty_proxy import faulty_proxy

ROOT = Path(__file__).resolve().parents[2]
CACHE_BYTES = 1_000_000


def run(folder: Path, name: str, train: str, held_out: str, *overrides: str, **environment: str) -> Path:
    """Run a small recipe to its end; the folder of its stage."""
    recipe = {
        "name": name,
        "processes": 2,
        "model": {"width": 16, "depth": 2, "heads": 2, "patch_size": 4},
        "engine": {"backend": "accelerate", "precision": "fp32"},
        "data": {"workers": 1, "shuffle_window_images": 30, "lanes": 2},
        "stages": {
            "finetune": {
                "start": "scratch",
                "train": train,
                "eval": held_out,
                "image_size": 8,
                "global_batch_size": 32,
                "duration": "3 epochs",
                "optimizer": {"name": "adamw", "lr": 0.002},
                "log_every": "1 steps",
                "eval_every": "50%",
            },
        },
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "run", f"{name}.yaml", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name / "finetune"


def curve(stage: Path) -> list[tuple[int, dict[str, float]]]:
    """Everything logged but speeds and times."""
    return [
        (row.step, {name: value for name, value in row.metrics.items() if not name.startswith("perf/")})
        for row in read_metrics(stage / "metrics.jsonl")
    ]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[Path, str]]:
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
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket="images")
        for file in sorted((tmp_path / "digits").rglob("*")):
            if file.is_file() and file.suffix != ".idx":
                client.upload_file(str(file), "images", f"packed/{file.relative_to(tmp_path / 'digits')}")
        client.close()
        yield tmp_path, f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore")
def test_a_run_from_a_failing_bucket_with_a_small_cache_is_the_local_run_to_the_last_digit(bucket):
    folder, address = bucket
    local = run(folder, "local", str(folder / "digits/train"), str(folder / "digits/val"))
    assert sum(file.stat().st_size for file in (folder / "digits").rglob("*.tar")) > 2 * CACHE_BYTES
    cache = folder / "cache"
    with faulty_proxy(address) as (proxy, counts):
        remote = run(
            folder,
            "remote",
            "s3://images/packed/train",
            "s3://images/packed/val",
            f"data.cache.folder={cache}",
            f"data.cache.limit={CACHE_BYTES} B",
            AWS_ENDPOINT_URL=proxy,
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
        )
    assert curve(remote) == curve(local)
    digests = [json.loads((stage / "stage.json").read_text())["model_digest"] for stage in (local, remote)]
    assert digests[0] == digests[1]
    assert all(counts[fault] for fault in ("503", "cut", "short", "slow")), counts
    kept = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    assert 0 < kept <= CACHE_BYTES
    assert not list(cache.rglob("*.part"))
