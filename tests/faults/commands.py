"""Other commands than `run` on a case's folder, with the same marks and faults: pack and export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.faults.harness import INJECT, MARK, PATIENCE_SECONDS, ROOT, Case, Ended, Fault


def shardvit(case: Case, *arguments: str, faults: Sequence[Fault] = ()) -> Ended:
    """Run `shardvit ARGUMENTS` in the case's folder to its end."""
    start = time.monotonic()
    paths = [*([str(INJECT)] if faults else []), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *arguments],
        cwd=case.folder,
        env={
            **os.environ,
            **{"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(case.temporary), MARK: case.mark},
            **({"SHARDVIT_FAULT": json.dumps(list(faults))} if faults else {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout, time.monotonic() - start)


def pack_digits(case: Case, *, faults: Sequence[Fault] = ()) -> Ended:
    """Pack the suite's shards once more, into `case.folder / "packed/digits"`: files are named after the folder."""
    (case.folder / "packed").mkdir(exist_ok=True)
    arguments = ("--classes", "0,1,2", "--holdout", "0.2", "--samples-per-shard", "100")
    return shardvit(case, "pack", "digits", "packed/digits", *arguments, faults=faults)
