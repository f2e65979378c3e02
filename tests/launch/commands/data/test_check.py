"""`shardvit check`: exit codes, text and JSON, remote shards, and mistakes as one sentence."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launch.conftest import Call

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    from shardvit.data_shards.packing.pack import pack

    draw = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    pack(str(tmp_path / "images"), tmp_path / "shards", holdout=0.25, samples_per_shard=6, report=lambda line: None)
    return tmp_path / "shards"


def a_tar(packed: Path) -> Path:
    return min((packed / "train").glob("*.tar"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(packed: Path) -> Iterator[str]:
    """The URL of the folder."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(packed))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_sound_shards(call: Call, packed: Path):
    code, output, error = call("check", packed, "--decode", "--world-size", 2, "--lanes", 4)
    assert code == 0 and error == ""
    assert output.splitlines()[-1].startswith("check: all is well (")
    for words in (f"train: {packed}/train", f"val: {packed}/val", "18 in 3 shards", "PNG", "cat", "for 2 processes"):
        assert words in output, words


def test_damage_is_exit_code_1_and_the_text_names_it(call: Call, packed: Path):
    tar = a_tar(packed)
    tar.write_bytes(tar.read_bytes()[:-3000])
    code, output, _ = call("check", packed / "train")
    assert code == 1 and tar.name in output and "check: 1 problem (" in output


def test_json(call: Call, packed: Path):
    a_tar(packed).unlink()
    code, output, _ = call("check", packed, "--json")
    content = json.loads(output)
    assert code == 1 and content["ok"] is False and content["problems"] == 1
    assert [split["split"] for split in content["splits"]] == ["train", "val"]
    assert content["findings"][0]["kind"] == "missing-shard"


def test_no_digests_finds_no_flipped_bit(call: Call, packed: Path):
    tar = a_tar(packed)
    data = bytearray(tar.read_bytes())
    data[-1000] ^= 1 if data[-1000] else 0  # among the zeros at the end nothing but the digest would see it
    at = data.index(b"IDAT") + 9
    data[at] ^= 1
    tar.write_bytes(bytes(data))
    assert call("check", packed)[0] == 1
    assert call("check", packed, "--no-digests")[0] == 0
    assert call("check", packed, "--no-digests", "--decode")[0] == 1


def test_images_above_the_limit_are_told_when_they_are_decoded(call: Call, packed: Path):
    assert call("check", packed, "--max-image-pixels", 1)[0] == 0
    code, output, _ = call("check", packed, "--max-image-pixels", 1, "--decode")
    assert code == 1 and "--max-image-pixels" in output
    code, _, error = call("check", packed, "--max-image-pixels", 0)
    assert code == 2 and error.count("\n") == 1 and "--max-image-pixels" in error


def test_a_number_of_processes_that_does_not_fit(call: Call, packed: Path):
    code, output, _ = call("check", packed, "--world-size", 3, "--lanes", 4)
    assert code == 1 and "3 processes cannot share 4 lanes" in output and "1, 2 or 4 processes" in output


def test_tars_without_a_manifest(call: Call, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (packed / "train" / "manifest.json").unlink()
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    pattern = str(packed / "train" / f"{a_tar(packed).stem[:-1]}{{0..2}}.tar")
    code, output, _ = call("check", pattern, "--label", "cls", "--classes", names)
    assert code == 0 and "18 in 3 shards" in output and "dog" in output and "without a digest" in output


def test_remote_shards(call: Call, served: str, packed: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    code, output, _ = call("check", served, "--cache", cache, "--cache-limit", "1GB", "--decode")
    assert code == 0 and f"train: {served}/train" in output and "val: " in output
    assert len(list(cache.rglob("*.tar"))) == len(list(packed.rglob("*.tar")))
    a_tar(packed).unlink()
    code, output, _ = call("check", f"{served}/train", "--cache", tmp_path / "other")
    assert code == 1 and a_tar(packed).name.replace("000001", "000000") in output and "404" in output


def test_statistics_may_be_written_to_a_url(call: Call, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardvit.data_shards.sets.statistics_summary import summarise

    monkeypatch.chdir(tmp_path)
    place = f"memory://{tmp_path.name}"
    code, _, error = call("check", packed, "--decode", "--statistics", "--output", place)
    assert code == 0 and f"{place}/val/statistics.parquet" in error
    assert summarise(f"{place}/val").images == 6 and not Path("memory:").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], ["nowhere"]),
        (["images"], ["images", "manifest.json"]),
        (["shards/train", "--label", "cls"], ["shards/train", "label"]),
        (["shards", "--world-size", "0"], ["--world-size", "1 or more"]),
        (["shards", "--lanes", "8"], ["--lanes", "--world-size"]),
        (["shards", "--cache", "c"], ["--cache", "local"]),
        (["s3://x/{0..1}.tar", "--cache-limit", "much"], ["--cache-limit", "'much'"]),
        (["shards", "--output", "seen"], ["--output", "--against"]),
        (["shards", "--against", "shards/val", "--output", "s3://bucket/seen"], ["--output", "URL", "folder"]),
        (["shards", "--nothing"], ["--nothing"]),
        ([], ["shards"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_of_the_user(
    call: Call, packed: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: list[str]
):
    monkeypatch.chdir(packed.parent)
    code, output, error = call("check", *args)
    assert code == 2 and output == "" and "Traceback" not in error
    assert error.startswith("shardvit: ") and error.count("\n") == 1
    for word in words:
        assert word.lower() in error.lower(), word


def test_a_real_process_with_workers_of_its_own(packed: Path):
    """The workers are spawned: they import the command's main module once more, which must not run it."""
    done = subprocess.run(
        [sys.executable, "-m", "shardvit.launch.cli", "check", str(packed / "train"), "--decode"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "check: all is well" in done.stdout
