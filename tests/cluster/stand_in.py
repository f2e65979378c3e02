"""Stands in for `launch.train` where the queue is what is tested: no torch, steps of a tenth of a second.

    python -m tests.cluster.stand_in RECIPE --stage pretrain --runs RUNS

Told to stop it saves and exits with 75, as a rank does. RUNS/NAME/orders.json may say otherwise:
    {"steps": 50}            how long it is
    {"crash_at": [7, 9]}     exit code 1 at these steps, each once, if nothing else is said
    {"code": 2}              of the crash
    {"save_every": 5}        steps between checkpoints; 0: only when told to stop
    {"deaf": true}           signals are ignored
    {"lose": true}           nothing is ever saved
    {"until": "continue"}       it resumes, past its last step too, until the run folder has this file
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from shardvit.launch.local.env import read_place
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES, EXIT_STOPPED
from shardvit.pipeline.runs.run_folder import RunFolder

STEP_SECONDS = 0.1


def main() -> int:
    """Pretend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--stage", choices=ALL_STAGES, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--own-code", choices=["recorded"], required=True)
    options = parser.parse_args()
    place = read_place()
    recipe = load_recipe(options.recipe)
    folder = RunFolder(runs_root=options.runs, name=recipe.name)
    folder.check_recipe(recipe)
    if place.is_main:
        folder.open(recipe)
    orders = {"steps": 20, "crash_at": [], "code": 1, "save_every": 5, "deaf": False, "lose": False, "until": ""}
    file = folder.path / "orders.json"
    if file.exists():
        orders |= json.loads(file.read_text())
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if orders["deaf"] else ask)
    begun = step = folder.record(options.stage).last_saved_step
    print(f"{options.stage} rank {place.rank} of {place.world_size} resumes from step {step}", flush=True)

    # Together, as real ranks: one that is late would find what the first has saved meanwhile.
    attempt = "-".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    (folder.path / f"met-{attempt}-{place.rank}").touch()
    while not asked and len(list(folder.path.glob(f"met-{attempt}-*"))) < place.world_size:
        time.sleep(STEP_SECONDS / 10)

    def save(state: str) -> None:
        if place.is_main and not (orders["lose"] and state == "running"):
            results = {}
            if state == "done" and options.stage != "swap_head":  # the larger the rate, the better
                score = recipe.train_stage(options.stage).optimizer.lr
                results = {"val/top1": score, "val/loss": 1.0, "val/images": 10.0}
            folder.update(options.stage, state=state, last_saved_step=step, results=results)

    def is_long_enough() -> bool:
        return step >= orders["steps"] and (not orders["until"] or (folder.path / orders["until"]).exists())

    while options.stage != "swap_head" and not is_long_enough():
        time.sleep(STEP_SECONDS)
        step += 1
        if asked:
            save("running")
            return EXIT_STOPPED
        if orders["save_every"] and step % orders["save_every"] == 0:
            save("running")
        if step in orders["crash_at"] and step > begun and place.is_main:
            mark = folder.path / f"crashed-{options.stage}-{step}"
            if orders["lose"] or not mark.exists():
                mark.touch()
                return orders["code"]
    save("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
