"""`shardvit table8`: the position embeddings of the ViT paper's Table 8, trained on one small set and compared.

Each cell is an ordinary run of one recipe with only `model.position` and `model.position_at` changed. Finished runs are
skipped and interrupted ones resumed. Costs nine trainings, one a cell.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from data_shards.durable import replace_text
from data_shards.errors import UserError
from data_shards.text import table

RECIPE = "digits_positions"  # its images are packed where they are missing
_HOLDOUT = 0.3

_ROWS = {
    "none": "none",
    "learned_1d": "1-D",
    "learned_2d": "2-D",
    "relative": "relative",
    "sincos_2d": "sin-cos 2-D, fixed",
}
_COLUMNS = {"stem": "stem", "every_layer": "every layer", "every_layer_shared": "every layer, shared"}


@dataclass(frozen=True)
class Table8Cell:
    """One position embedding."""

    position: str
    at: str
    paper: float | None  # 5-shot linear accuracy on ImageNet of a B/16 from JFT-300M (arXiv 2010.11929, Table 8)

    @property
    def name(self) -> str:
        return f"{self.position}-{self.at}".replace("_", "-")


CELLS = (
    Table8Cell("none", "stem", 0.61382),
    Table8Cell("learned_1d", "stem", 0.64206),
    Table8Cell("learned_1d", "every_layer", 0.63964),
    Table8Cell("learned_1d", "every_layer_shared", 0.64292),
    Table8Cell("learned_2d", "stem", 0.64001),
    Table8Cell("learned_2d", "every_layer", 0.64046),
    Table8Cell("learned_2d", "every_layer_shared", 0.64022),
    Table8Cell("relative", "stem", 0.64032),
    Table8Cell("sincos_2d", "stem", None),
)


@dataclass(frozen=True)
class Result:
    """What one run reached."""

    cell: Table8Cell
    run: str
    top1: float
    images: int  # held out, on which top1 was measured
    seconds: float

    def as_tree(self) -> dict[str, object]:
        tree = asdict(self)
        cell = tree.pop("cell")
        return {"position": cell["position"], "position_at": cell["at"], "paper_5_shot": cell["paper"], **tree}


def table8(
    recipe: str = RECIPE,
    /,
    *overrides: str,
    runs: Annotated[Path, Parameter(help="Folder of all runs, of mlflow.db, and of the table.")] = Path("runs"),
    shards: Annotated[
        Path | None, Parameter(help=f"Where {RECIPE}'s shards are packed to; default: shards. For that recipe only.")
    ] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print the table as JSON.")] = False,
) -> int:
    """Compare position embeddings as in the ViT paper's Table 8: none, 1-D, 2-D, relative; at the stem or every layer.

    RECIPE is a YAML file or the name of a recipe that ships with shardvit;
    OVERRIDES are changes to it, key=value. It is run once for each position
    embedding, in RUNS/NAME-POSITION-PLACE; runs that are done are skipped and an
    interrupted one is resumed. The table is printed and left in RUNS/table8.txt and
    RUNS/table8.json.

    Some examples:
        shardvit table8

        shardvit table8 digits_positions stages.pretrain.duration="200 steps"

        shardvit table8 my.yaml processes=8 --json
    """
    with _standard_output_to_error() if as_json else contextlib.nullcontext():
        code, results = run_cells(CELLS, recipe, overrides=overrides, runs_root=runs, shards_root=shards)
    if code:
        return code
    text, tree = format_results(results), json.dumps([each.as_tree() for each in results], indent=1)
    replace_text(runs / "table8.txt", text + "\n", sync="none")
    replace_text(runs / "table8.json", tree + "\n", sync="none")
    print(tree if as_json else f"\n{text}")
    return 0


def run_cells(
    cells: Sequence[Table8Cell], recipe: str, *, overrides: Sequence[str], runs_root: Path, shards_root: Path | None
) -> tuple[int, list[Result]]:
    """Check all runs, then carry out those that are not done; returns the exit code, and the results if it is 0. Raises
    UserError for anything that would stop one of the runs."""
    from pipeline.recipe.io import load_recipe

    for override in overrides:
        key = override.partition("=")[0]
        if key in ("model.position", "model.position_at"):
            raise UserError(f"{key} is what table8 varies itself: leave it out")
    base = load_recipe(recipe, overrides=overrides)

    from data_shards.packing.pack import pack
    from launch.run.pipeline_run import PipelineRun

    last = base.stages.names[-1]
    if last not in ("pretrain", "finetune"):
        raise UserError(f"{recipe}: its last stage is {last}, which has no top-1 to compare: end in another")
    if recipe == RECIPE:
        folder = (shards_root or Path("shards")) / "digits"
        pack("digits", folder, holdout=_HOLDOUT)
        given = {override.partition("=")[0] for override in overrides}
        places = {"stages.pretrain.train": folder / "train", "stages.pretrain.eval": folder / "val"}
        overrides = [*(f"{key}={place}" for key, place in places.items() if key not in given), *overrides]
    elif shards_root is not None:
        raise UserError(f"--shards: only {RECIPE}'s are packed, and {recipe} names its own; leave it out")
    opened = [
        PipelineRun.open(
            load_recipe(
                recipe,
                overrides=[
                    *(override for override in overrides if not override.startswith("name=")),
                    f"name={base.name}-{cell.name}",
                    f"model.position={cell.position}",
                    f"model.position_at={cell.at}",
                ],
            ),
            runs_root=runs_root,
        )
        for cell in cells
    ]
    results = []
    for number, (cell, run) in enumerate(zip(cells, opened, strict=True), start=1):
        print(f"\n== {number} of {len(cells)}: {run.recipe.name} ==", flush=True)
        if code := run.execute():
            return code, []
        records = [run.folder.record(stage) for stage in run.recipe.stages.names]
        by = run.recipe.train_stage(run.recipe.stages.names[-1]).judged_by("top1")
        top1, images = (records[-1].results[key] for key in (by, "val/images"))
        results.append(Result(cell, run.recipe.name, top1, int(images), sum(record.seconds for record in records)))
    return 0, results


def format_results(results: Sequence[Result]) -> str:
    """The paper's table with our numbers, its own in brackets, and how to read them."""
    shown = {
        (each.cell.position, each.cell.at): f"{each.top1:.4f}"
        + (" " * 10 if each.cell.paper is None else f" ({each.cell.paper:.5f})")
        for each in results
    }
    rows = [("position embedding", *_COLUMNS.values())]
    for position, name in _ROWS.items():
        if any(position == each.cell.position for each in results):
            rows.append((name, *(shown.get((position, at), "N/A") for at in _COLUMNS)))
    error = max(math.sqrt(each.top1 * (1 - each.top1) / each.images) for each in results)
    return (
        f"{table(rows, align='lr', heading='ruled')}\n"
        f"Top-1 on {min(each.images for each in results):,} held-out images, one run each: one standard error is up to "
        f"{error:.4f}.\n"
        "In brackets the ViT paper's Table 8: B/16, JFT-300M, ImageNet 5-shot; another measure, so only the order\n"
        "can be compared. The fixed sin-cos embedding is not in the paper's table."
    )


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Keeps what this process and its children print out of the JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
