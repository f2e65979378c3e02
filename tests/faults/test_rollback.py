"""Going back to a checkpoint from before trouble: the run ends as if the batches that led to it had not been there."""

import json
from typing import Any

import pytest

from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
from shardvit.pipeline.runs.logs import read_metrics
from tests.faults.conftest import NewCase
from tests.faults.harness import Case
from tests.faults.rows import Row

ROLLBACK = (
    "With a stage's rollback, several steps in a row whose gradient is not finite, or a loss spike, make the run go "
    "back to a checkpoint from before them and pass over their batches, to the same weights as without them; as often "
    "as the recipe says, then it stops."
)
FIRST, LAST, BEFORE = 22, 24, 3
CHANGES = {"stages.pretrain.rollback": {"after_skipped_steps": 3, "steps_before": BEFORE, "times": 2}}


def without(case: Case, *, steps: list[int]) -> None:
    """A run that passes over these steps from the beginning."""
    case.stage.mkdir(parents=True)
    (case.stage / "stage.json").write_text(json.dumps({"passed_over": steps, "rollbacks": 1}), encoding="utf-8")
    (case.run / "recipe.yaml").write_text(dump_recipe(load_recipe(str(case.folder / "recipe.yaml"))), encoding="utf-8")
    ended = case.start().wait()
    assert ended.code == 0, ended.output


@pytest.mark.parametrize(
    ("processes", "stage"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.fast), (2, 0), (4, 3)],
    ids=lambda number: str(number),
)
def test_three_steps_in_a_row_that_are_not_finite(new_case: NewCase, row: Row, processes: int, stage: int) -> None:
    row.is_about(f"NaN in the gradients of 3 steps, {processes} processes, ZeRO {stage}", ROLLBACK)
    changes: dict[str, Any] = {**CHANGES, "processes": processes, "engine.zero_stage": stage}
    baseline, case = new_case("baseline", changes=changes), new_case(changes=changes)
    without(baseline, steps=list(range(FIRST - BEFORE, LAST + 1)))
    nan = case.fault("nan", "backward", rank=processes - 1, step=FIRST, last_step=LAST, once=None)
    ended = case.start(faults=[nan]).wait()
    row.ends(ended, code=0, says="3 steps in a row.*going back.*rollback 1 of 2")
    assert case.record()["passed_over"] == list(range(FIRST - BEFORE, LAST + 1)) and case.record()["rollbacks"] == 1
    row.is_unharmed(case, baseline)
    row.lost = "the batches that are skipped"


def test_with_a_moving_average_and_in_the_first_steps(new_case: NewCase, row: Row) -> None:
    row.is_about("NaN in the gradients of steps 2 to 4 and 22 to 24, with a moving average, ZeRO 2", ROLLBACK)
    changes = {**CHANGES, "engine.zero_stage": 2, "stages.pretrain.ema": {"decay": 0.9}, "data.workers": 2}
    baseline, case = new_case("baseline", changes=changes), new_case(changes=changes)
    passed_over = [*range(5), *range(FIRST - BEFORE, LAST + 1)]
    without(baseline, steps=passed_over)
    early = case.fault("nan", "backward", rank=0, step=2, last_step=4, once=None)
    nan = case.fault("nan", "backward", rank=1, step=FIRST, last_step=LAST, once=None)
    ended = case.start(faults=[early, nan]).wait()
    row.ends(ended, code=0, says="back to before step 1,.*rollback 1 of 2")
    assert case.record()["passed_over"] == passed_over and case.record()["rollbacks"] == 2
    assert {row.step for row in read_metrics(case.stage / "metrics.jsonl") if "val/ema_loss" in row.metrics}
    row.is_unharmed(case, baseline)
    row.lost = "the batches that are skipped"


def test_killed_while_it_goes_back(new_case: NewCase, row: Row) -> None:
    row.is_about("NaN in the gradients of 3 steps; everything is killed while the abandoned checkpoints go", ROLLBACK)
    changes = {**CHANGES, "stages.pretrain.save_every": "7 steps", "stages.pretrain.keep_checkpoints": 3}
    baseline, case = new_case("baseline", changes=changes), new_case(changes=changes)
    without(baseline, steps=list(range(FIRST - BEFORE, LAST + 1)))
    nan = case.fault("nan", "backward", rank=1, step=FIRST, last_step=LAST, once=None)
    kill = case.fault("kill_all", "save.pruning", rank=0, step=21)
    ended = case.start(faults=[nan, kill]).wait()
    row.ends(ended, code=-9)
    row.recovers(case, baseline, case.start(faults=[nan]).wait(), reached=FIRST, at_most=FIRST)
    assert case.record()["rollbacks"] == 1


def test_trouble_without_end(new_case: NewCase, row: Row) -> None:
    row.is_about("NaN in the gradients from step 22 on, with two rollbacks allowed", ROLLBACK)
    baseline, case = new_case("baseline", changes=CHANGES), new_case(changes=CHANGES)
    without(baseline, steps=list(range(FIRST - BEFORE, LAST + 6)))
    nan = case.fault("nan", "backward", rank=1, step=FIRST, last_step=10_000, once=None)
    ended = case.start(faults=[nan]).wait()
    row.ends(ended, code=1, says="after 2 rollbacks.*optimizer.lr")
    assert case.record()["rollbacks"] == 2
    continued = case.start().wait()
    row.loses(continued, reached=31, at_most=31)
    # The checkpoint of step 30 came after two more steps that were skipped, which move nothing either.
    assert case.record()["model_digest"] == baseline.record()["model_digest"]
    row.continued = "the same weights"
    row.leaves_nothing(case, baseline)
