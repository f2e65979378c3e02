"""Takes three steps of each stage of recipes, on one process; started as `shipped_recipes_worker.py OUT RECIPE...`.

RECIPE is a resolved recipe's YAML file. Its stages go through the code of a rank, its shards are on the disk. For each
there is OUT/NAME.json at the end: the losses of each stage, or the error.
"""

import json
import sys
import time
import traceback
from pathlib import Path

from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import StopFlag
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.runs.logs import read_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.training.stages import run_stage


def main(out: Path, files: list[Path]) -> None:
    ranks = Ranks(Place(), timeout_seconds=600)
    for file in files:
        began = time.process_time()
        try:
            recipe = parse_recipe(file)
            folder = RunFolder(runs_root=out / "runs", name=recipe.name)
            folder.open(recipe)
            context = StageContext(recipe, folder, ranks, StopFlag(), {})
            found: dict[str, object] = {"losses": {}}
            for stage in recipe.stages.names:
                run_stage(context, stage=stage)
                rows = read_metrics(folder.stage(stage) / "metrics.jsonl")
                found["losses"][stage] = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
        except BaseException:  # noqa: BLE001 - the test that asks for this recipe tells it
            found = {"error": traceback.format_exc()}
        found["cpu_seconds"] = time.process_time() - began
        (out / f"{file.stem}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(file) for file in sys.argv[2:]])
