"""Packing continues after any end, and the result is the one of an undisturbed packing, to the byte."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.image import Resize
from shardvit.data_shards.store.folders import LocalFolder
from tests.data_shards.packing.folders import quiet, spoken, tree

ROOT = Path(__file__).resolve().parents[3]


def write_images(root: Path, *, count: int, side: int = 16, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    draw = np.random.default_rng(count)
    for i in range(count):
        folder = root / classes[i % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(folder / f"{i:04d}.jpg", quality=95)


# ---- kill -9 and Ctrl-C


# On one core, so on one thread. Once so many shards are finished it makes the file HELD and waits in the middle of
# the next one, until the packing is given up: else a slow machine sends its signal when all is over.
COMMAND = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from shardvit.data_shards.packing import shard_writer
from shardvit.launch.cli import main

records, held, least = Path(sys.argv.pop(1)), Path(sys.argv.pop(1)), int(sys.argv.pop(1))
given_up, images_since = threading.Event(), 0
prepare_image, shutdown = shard_writer.prepare_image, ThreadPoolExecutor.shutdown

def prepare_and_wait(data, **options):
    global images_since
    images_since += len(list(records.glob("*.json"))) >= least
    if images_since == 3:
        held.touch()
        given_up.wait()
    return prepare_image(data, **options)

def shut_down(self, *arguments, **options):
    given_up.set()
    shutdown(self, *arguments, **options)

shard_writer.prepare_image, ThreadPoolExecutor.shutdown = prepare_and_wait, shut_down
main()
"""


def start(tmp_path: Path, *arguments: object, held_at: int = 1000) -> subprocess.Popen[str]:
    places = (tmp_path / ".out.packing/records", tmp_path / "HELD", held_at)
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, places), "pack", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_real_command_killed_and_interrupted(tmp_path: Path):
    write_images(tmp_path / "in", count=80, side=128)
    options = ("--holdout", "0.2", "--samples-per-shard", "5", "--resize-short", "100", "--name", "in")
    plain = start(tmp_path, tmp_path / "in", tmp_path / "plain", *options)
    output, _ = plain.communicate(timeout=240)
    assert plain.returncode == 0, output
    records = tmp_path / ".out.packing/records"
    # Finished shards, of 17; the signal; the exit code.
    for least, sent, code in (
        *((1, signal.SIGKILL, -9), (3, signal.SIGINT, 75)),
        *((5, signal.SIGTERM, 75), (7, signal.SIGKILL, -9)),
    ):
        process = start(tmp_path, tmp_path / "in", tmp_path / "out", *options, held_at=least)
        while process.poll() is None and not (tmp_path / "HELD").exists():
            time.sleep(0.01)
        process.send_signal(sent)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == code, output
        (tmp_path / "HELD").unlink()
        assert "Traceback" not in output
        assert ("interrupted: nothing is broken, type the same command again" in output) == (code == 75)
        assert not (tmp_path / "out").exists()
    finished = len(list(records.glob("*.json")))
    assert 7 <= finished < 17
    process = start(tmp_path, tmp_path / "in", tmp_path / "out", *options)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"resuming: {finished} of 17 shards finished" in output
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "plain"}


def test_the_real_command_speaks_while_it_decodes(tmp_path: Path):
    write_images(tmp_path / "in", count=12)
    process = start(tmp_path, tmp_path / "in", tmp_path / "out", held_at=0)
    assert process.stdout is not None
    while process.poll() is None and not (tmp_path / "HELD").exists():
        time.sleep(0.01)
    told, _, _ = select.select([process.stdout], [], [], 10)
    process.kill()
    assert told and "12 images of 2 classes found" in process.communicate()[0]


EVERY_MOMENT = """
import hashlib, os, sys
from pathlib import Path
from shardvit.data_shards.packing.pack import pack
from PIL import Image, JpegImagePlugin  # once, instead of in every child
import pandas, pyarrow.compute, pyarrow.parquet, simplejpeg
from shardvit.data_shards.images import decode_nvimgcodec
from shardvit.data_shards.sets import statistics

top = Path(sys.argv[1])
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}

def packed(out, dies_at):
    seen = [0]
    def watch(event, arguments):
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or is_write) and ".packing" in str(arguments[0]):
            seen[0] += 1
            if seen[0] == dies_at:
                os._exit(9)
    sys.addaudithook(watch)
    pack(str(top / "in"), out, samples_per_shard=3, holdout=0.4, unreadable="skip", name="in", report=lambda line: None)
    return seen[0]

def in_child(*arguments):
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 100 if packed(*arguments) else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def tree(root):
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

os.fsync = lambda descriptor: None  # a process dies here, not the machine; on a busy disk it would take minutes
assert in_child(top / "plain", 0) == 100
reference = tree(top / "plain")
moment = 0
while True:
    moment += 1
    out = top / f"out{moment}"
    code = in_child(out, moment)
    assert code in (9, 100), code
    again = in_child(out, 0)
    assert again in (0, 100), again
    assert tree(out) == reference, moment
    assert not (top / f".out{moment}.packing").exists(), moment
    if code == 100:
        break
print(moment - 1)
"""


def test_death_at_every_single_change_of_the_disk(tmp_path: Path):
    """The process dies right before each file that it opens for writing, renames, makes or removes."""
    write_images(tmp_path / "in", count=9)
    (tmp_path / "in/cat/0004.jpg").write_bytes(b"broken")
    (tmp_path / "in/dog/same.jpg").write_bytes((tmp_path / "in/dog/0001.jpg").read_bytes())
    output = subprocess.check_output([sys.executable, "-c", EVERY_MOMENT, tmp_path], text=True, cwd=ROOT)
    assert int(output) >= 30


# ---- other ends


class Stopper:
    """Makes the writer fail at its n-th shard, once the others have got somewhere."""

    def __init__(self, error: BaseException, *, at: int) -> None:
        self.error, self.at, self.count = error, at, 0
        self.lock = threading.Lock()

    def __call__(self, path: Path) -> None:
        with self.lock:
            self.count += 1
            if self.count == self.at:
                raise self.error


def fail_at(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, at: int) -> None:
    """The index and the tar are put in place by calls 1 and 2 of the first shard, and so on (on one thread)."""
    stopper, put = Stopper(error, at=at), LocalFolder.put

    def put_or_stop(self: LocalFolder, name: str, file: Path) -> None:
        if "/" in name:  # a shard's
            stopper(file)
        put(self, name, file)

    monkeypatch.setattr("shardvit.data_shards.packing.pack.num_cores", lambda: 1)
    monkeypatch.setattr(LocalFolder, "put", put_or_stop)


def test_a_full_disk_is_one_sentence_and_what_is_finished_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = {"classes": ["0", "1"], "samples_per_shard": 100}
    with monkeypatch.context() as patch:
        fail_at(patch, OSError(28, "No space left on device"), at=6)  # the third tar
        with pytest.raises(UserError, match=r"the disk is full.*type the same command again") as caught:
            quiet("digits", tmp_path / "out", **arguments)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".out.packing"]
    assert len(list((tmp_path / ".out.packing/result/train").glob("*.tar"))) == 2  # the third is not left about
    _, text = spoken("digits", tmp_path / "out", **arguments)
    assert "resuming: 2 of 4 shards" in text and "discarded" not in text
    quiet("digits", tmp_path / "plain", **arguments)
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")


def test_an_end_before_the_first_shard_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        fail_at(patch, KeyboardInterrupt(), at=1)
        with pytest.raises(KeyboardInterrupt):
            quiet("digits", tmp_path / "out", classes=["0", "1"], samples_per_shard=100)
    assert not list(tmp_path.iterdir())


def test_other_errors_of_the_machine_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        fail_at(patch, OSError(5, "Input/output error"), at=1)
        with pytest.raises(OSError, match="Input/output"):
            quiet("digits", tmp_path / "out", classes=["0", "1"], samples_per_shard=100)


# ---- what is kept, and what is not


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two of the four shards of `in` are finished."""
    write_images(tmp_path / "in", count=20)
    with monkeypatch.context() as patch:
        fail_at(patch, KeyboardInterrupt(), at=5)
        with pytest.raises(KeyboardInterrupt):
            quiet(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5)
    return tmp_path


def test_another_request_starts_afresh_and_says_so(half: Path):
    for arguments in ({"seed": 1}, {"resize": Resize(8)}, {"holdout": 0.5}, {"samples_per_shard": 4}):
        out = half / "copy"
        subprocess.check_call(["cp", "-a", half / ".out.packing", half / ".copy.packing"])
        options = {"samples_per_shard": 5, **arguments}
        _, text = spoken(str(half / "in"), out, **options)
        assert "2 shards of an earlier attempt discarded" in text and "resuming" not in text
        quiet(str(half / "in"), half / "plain", **options)
        assert tree(out) == tree(half / "plain")
        assert (out / "val").exists() == ("holdout" in arguments)
        subprocess.check_call(["rm", "-r", out, half / "plain"])


def finished_images(half: Path) -> set[str]:
    """Stems of the images in the two finished shards."""
    from shardvit.data_shards.shards.tar_index import build_index

    tars = sorted((half / ".out.packing/result/train").glob("*.tar"))
    assert len(tars) == 2
    return {key.split("_")[1] for tar in tars for key in build_index(tar).keys}


def test_a_changed_image_of_the_same_size_is_packed_anew(half: Path):
    stem = min(finished_images(half))
    path = next((half / "in").rglob(f"{stem}.jpg"))
    before = path.stat()
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xd9")  # the same bytes, another time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))  # also where times are coarse
    _, text = spoken(str(half / "in"), half / "out", samples_per_shard=5)
    assert "resuming: 1 of 4" in text and "1 shard of an earlier attempt discarded" in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda work: os.truncate(next(work.glob("result/train/*0.tar")), 600),
        lambda work: next(work.glob("result/train/*0.tar")).unlink(),
        lambda work: next(work.glob("result/train/*0.idx")).unlink(),
        lambda work: next(work.glob("result/train/*0.idx")).write_text("v1.2 0"),
        lambda work: next(work.glob("records/*0.tar.json")).write_text("{"),
        lambda work: next(work.glob("records/*0.tar.json")).write_text("[]"),
        lambda work: next(work.glob("records/*0.tar.json")).write_bytes(b"\0" * 100),
        lambda work: (work / "result/train/stale.tar").write_bytes(b"half"),
        lambda work: (work / "train").mkdir(),
        lambda work: (work.parent / "in/cat/new.jpg").write_bytes((work.parent / "in/cat/0000.jpg").read_bytes()),
    ],
)
def test_a_damaged_work_folder_does_no_harm(half: Path, damage):
    damage(half / ".out.packing")
    quiet(str(half / "in"), half / "out", samples_per_shard=5)
    quiet(str(half / "in"), half / "plain", samples_per_shard=5)
    assert tree(half / "out") == tree(half / "plain")
    assert {path.name for path in half.iterdir()} == {"in", "out", "plain"}


def test_unreadable_images_once_mended_cost_only_their_shards(tmp_path: Path):
    write_images(tmp_path / "in", count=20)
    whole = (tmp_path / "in/cat/0006.jpg").read_bytes()
    (tmp_path / "in/cat/0006.jpg").write_bytes(whole[:100])
    with pytest.raises(UserError, match="1 of 20 images cannot be read"):
        quiet(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5)
    (tmp_path / "in/cat/0006.jpg").write_bytes(whole)
    _, text = spoken(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5)
    assert "resuming: 3 of 4 shards" in text
    quiet(str(tmp_path / "in"), tmp_path / "plain", samples_per_shard=5)
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "plain"}  # the list beside OUT is gone too


def test_a_file_that_could_not_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardvit.data_shards.packing.sources.located import LocatedFiles

    write_images(tmp_path / "in", count=20)
    read = LocatedFiles.read

    def deny(self: LocatedFiles, index: int) -> bytes:
        if self.names[index] == "cat/0006.jpg":
            raise PermissionError(13, "Permission denied")
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(LocatedFiles, "read", deny)
        with pytest.raises(UserError, match=r"cat/0006\.jpg \(Permission denied\)"):
            quiet(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5)
    # As after a chmod: neither size nor time of the file have changed.
    report = quiet(str(tmp_path / "in"), tmp_path / "out", samples_per_shard=5)
    assert report.num_images == 20 and report.counts.unreadable == 0
