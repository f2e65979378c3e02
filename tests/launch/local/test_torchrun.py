"""Our torchrun ends with its ranks' exit code, or the signal's that it was sent, and without a traceback."""

import subprocess
import sys
import time
from pathlib import Path

RANK = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
Path(sys.argv[2]).touch()
if sys.argv[1] == "fails":
    sys.exit(7)
time.sleep(300)
"""


def start(tmp_path: Path, what: str) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "shardvit.launch.local.torchrun", "--standalone", "--nproc-per-node", "1"),
            *(str(script), what, str(tmp_path / "began")),
        ],
        cwd=Path(__file__).resolve().parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_ends_with_the_code_of_the_rank_that_failed(tmp_path: Path):
    process = start(tmp_path, "fails")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 7 and "Traceback" not in said


def test_a_signal_to_it_ends_the_ranks_and_is_its_exit_code(tmp_path: Path):
    process = start(tmp_path, "trains")
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + 15 and "Traceback" not in said
