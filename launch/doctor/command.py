"""`shardvit doctor`: the command. The checks are imported inside, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def doctor(
    *,
    quick: Annotated[
        bool, Parameter(negative="", help="Leave out what is tried in processes of its own: a second in all.")
    ] = False,
    runs: Annotated[Path, Parameter(help="Folder of all runs, whose disk is looked at.")] = Path("runs"),
    cache: Annotated[
        Path | None,
        Parameter(help="Folder for shards that are fetched; default: shardvit-cache-USER in $TMPDIR or /tmp."),
    ] = None,
    as_json_text: Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")] = False,
) -> int:
    """Say what this machine can run: each finding with a verdict and what to do.

    Python, cores, memory, disks and limits; the packages, against what
    shardvit asks for; GPUs, driver, NCCL, and the attention kernel that really
    runs; two processes that talk; MLflow's server; SLURM, ssh. Nothing is
    changed. A library that crashes or hangs is a finding, with its signal or
    time-out. In a batch job it says what that job was given.

    Verdicts: fine; note (it works, but read on); problem; absent (not here,
    which may well be right). Exit code 1 if there is a problem. It takes half a
    minute, nearly all of it the imports of the libraries.

    Some examples:
        shardvit doctor

        shardvit doctor --quick --runs /scratch/me/runs

        srun --nodes 1 --gpus-per-node 8 shardvit doctor --json > doctor.json
    """
    import json

    from data_shards.store.cache import default_cache_folder
    from launch.doctor.examine import examine
    from launch.doctor.report import as_json, as_text

    report = examine(
        runs=runs,
        cache=cache or default_cache_folder(),
        depth="quick" if quick else "all",
        say=lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True),
    )
    print(json.dumps(as_json(report), indent=1) if as_json_text else as_text(report))
    return report.exit_code
