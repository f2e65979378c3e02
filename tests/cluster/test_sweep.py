"""A sweep on a real SLURM: an array of points, one of which is stopped and requeued, the choice, the final run."""

import json
import re

from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.cluster.conftest import GO_ON, SubmittedRun

LR = "stages.finetune.optimizer.lr"


def test_an_array_of_points_the_choice_and_the_final_run(stand_in_run: SubmittedRun):
    run = stand_in_run
    root = run.folder / "runs" / "digits-sweep"
    point = RunFolder(runs_root=root, name="lr-0.3")
    point.path.mkdir(parents=True)
    orders = {"until": GO_ON, "save_every": 0}
    (point.path / "orders.json").write_text(json.dumps(orders))
    run.overrides += [f"{LR}=0.01,0.3"]
    options = ("--sweep", "--hold-out", "10%", "--at-once", "2")
    site = run.folder / "site.toml"
    site.write_text(f'python = "{run.python}"\n')
    again = (
        run.recipe,
        *run.overrides,
        "--nodes",
        "1",
        "--tasks-per-node",
        "1",
        "--time",
        "0:10:00",
        "--site",
        str(site),
    )
    told = run.cli("submit", *again, *options)
    jobs = dict(re.findall(r"([\w.-]+): job (\d+)", told.out))
    assert list(jobs)[1:] == ["swap_head", "finetune", "choose", "final-swap_head", "final-finetune", "sum-up"]
    log = root / "slurm" / "finetune-1.log"
    run.wait_for(lambda: log.exists() and "resumes from step 0" in log.read_text(), what="the second task")
    status = run.cli("status", str(point.path), "--json")
    finetune = json.loads(status.out)["stages"][-1]
    assert (finetune["job"], finetune["queue"]) == (f"{jobs['finetune']}_1", "RUNNING")
    assert "has jobs in the queue" in run.cli("submit", *again, *options, check=False).error

    run.slurm.run("scancel", "--signal=USR1", "--batch", f"{jobs['finetune']}_1")  # what SLURM sends for --signal
    run.wait_for(lambda: "requeued, it resumes from step" in log.read_text(), what="requeue")
    assert point.record("finetune").last_saved_step > 0
    (point.path / GO_ON).touch()

    def summed_up() -> bool:
        run.slurm.hurry(f"{jobs['finetune']}_1")
        return run.slurm.state(jobs["sum-up"]) == "COMPLETED"

    run.wait_for(summed_up, what="sum-up", patience_seconds=600)
    tree = json.loads((root / "sweep.json").read_text())
    assert (tree["chosen"], tree["final"]["state"], tree["final"]["score"]) == ("lr-0.3", "done", 0.3)
    assert [one["state"] for one in tree["points"]] == ["done", "done"]
    assert "requeued 1 times" in log.read_text() and "chosen" in (root / "slurm" / "sum-up.log").read_text()
    assert parse_recipe(root / "final" / "recipe.yaml").train_stage("finetune").optimizer.lr == 0.3
    assert "chosen" in run.cli("status", str(root)).out
