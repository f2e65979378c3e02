"""Disks that are full, too small or read-only: one sentence, the older checkpoints intact, and the command resumes."""

import hashlib
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.disks import fill, read_only, require_mounts, small_disk
from tests.faults.harness import Case, send
from tests.faults.rows import Row

FULL = (
    "A disk that is full during a save ends the run on all ranks with one sentence; the older checkpoints stay, what "
    "was half-written is removed, and with room made the same command resumes."
)
FAILS = (
    "A disk that fails during a save, as when a file server is away, ends the run with exit code 1 and the older "
    "checkpoints intact; --max-restarts resumes by itself."
)
FULL_LOG = (
    "A disk that is full for the metrics ends the run with one sentence; with room made the same command resumes."
)
FULL_MLFLOW = "A full MLflow disk is reported and harms nothing: metrics.jsonl has every value."
FULL_PACK = "A disk that is full while packing keeps the finished shards; the same command resumes, to the same bytes."
READ_ONLY = "A run folder that cannot be written is reported in one sentence before training starts."
SHM = "/dev/shm too small for worker processes ends the run with a message; with enough, or with threads, it resumes."

DISK_BYTES = 16_000_000


@pytest.mark.parametrize("saving", ["background", "blocking"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_disk_is_full_for_one_rank(
    rank: int, saving: str, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"disk full during a save of rank {rank}, {saving}", FULL)
    baseline, case = undisturbed(), new_case(changes={"engine.saving": saving})
    fault = case.fault("enospc", "save.writing", rank=rank, step=20)
    row.ends(case.start(faults=[fault]).wait(), code=2, says="No space left|full")
    assert case.saved() == [10]
    assert not list(case.stage.glob("checkpoints/.*"))
    row.recovers(case, baseline, reached=20)


def test_the_disk_fails_for_a_moment(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("disk error during a save, --max-restarts 1", FAILS)
    baseline, case = undisturbed(), new_case(changes={"engine.saving": "background"})
    fault = case.fault("eio", "save.writing", rank=1, step=20)
    ended = case.start("--max-restarts", "1", how="run", faults=[fault]).wait()
    row.ends(ended, code=0, says="Input/output error")
    row.recovers(case, baseline, ended, reached=20)


@pytest.mark.parametrize("saving", ["background", "blocking"])
def test_a_small_disk_is_full(saving: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"a small disk filled in mid-run, {saving}", FULL)
    require_mounts()
    baseline, case = undisturbed(), new_case(changes={"engine.saving": saving})
    with small_disk(case.folder / "runs", size_bytes=DISK_BYTES) as disk:
        attempt, rank = case.start_stopped(step=15)
        filler = fill(disk, leave_bytes=100_000)  # for metrics and records, not for a checkpoint
        send(rank, signal.SIGCONT)
        row.ends(attempt.wait(), code=2, says="No space left|full|free")
        assert case.saved() == [10]
        assert not list(case.stage.glob("checkpoints/.*"))
        filler.unlink()
        row.recovers(case, baseline, reached=20)


def test_the_disk_is_full_for_metrics(case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("disk full when a metric is written", FULL_LOG)
    baseline = undisturbed()
    fault = case.fault("enospc", "metrics.writing", nth=4)  # steps 7, 14, 21, 24
    row.ends(case.start(faults=[fault]).wait(), code=2, says="No space left|full")
    row.recovers(case, baseline, reached=24)


def test_the_disk_is_full_for_mlflow(case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("disk full for mlflow.db", FULL_MLFLOW)
    require_mounts()
    baseline = undisturbed()
    with small_disk(case.folder / "mlflow", size_bytes=65_536) as disk:
        ended = case.start(environment={"MLFLOW_TRACKING_URI": f"sqlite:///{disk}/mlflow.db"}).wait()
    row.ends(ended, code=0, says="MLflow.*")
    row.is_unharmed(case, baseline)


def test_a_read_only_run_folder(case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("read-only run folder", READ_ONLY)
    require_mounts()
    baseline = undisturbed()
    with small_disk(case.folder / "runs", size_bytes=DISK_BYTES) as disk:
        case.run_until_killed(step=26)
        before = contents(disk)
        with read_only(disk):
            row.ends(case.start(how="run").wait(), code=2, says="read-only")
            # Alone: a rank 0 that ends before the others have met it leaves them to srun's --kill-on-bad-exit.
            row.ends(case.start(processes=1).wait(), code=2, says="read-only")
        assert contents(disk) == before
        row.recovers(case, baseline, reached=26)


def test_the_disk_is_full_while_packing(case: Case, shards: Path, row: Row) -> None:
    row.is_about("disk full during pack", FULL_PACK)
    out = case.folder / "packed/digits"
    fault = case.fault("enospc", "pack.shard", nth=3)
    row.ends(case.pack_digits(faults=[fault]), code=2, says="disk is full")
    assert not out.exists()
    again = case.pack_digits()
    assert again.code == 0 and "in an earlier attempt" in again.output, again.output
    assert list(out.parent.iterdir()) == [out]
    row.has_the_same_bytes(tars(out), tars(shards))


def test_dev_shm_is_too_small(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("/dev/shm too small for worker processes", SHM)
    require_mounts()
    baseline = undisturbed()
    case = new_case(changes={"data.workers": 1, "data.worker_kind": "process"})
    with small_disk(Path("/dev/shm"), size_bytes=4096):
        row.ends(case.start().wait(), code={1, 2}, says="/dev/shm")
    row.recovers(case, baseline, case.start("data.worker_kind=thread").wait(), reached=0)


def tars(folder: Path) -> dict[str, str]:
    """Digest of every tar and index below, by name."""
    files = [path for path in folder.rglob("*") if path.suffix in (".tar", ".idx")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
