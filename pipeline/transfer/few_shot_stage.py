"""A stage's few-shot sets, ready to be measured at its evaluations; a stage without any imports nothing for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeline.engine.protocol import Engine
from pipeline.ranks.watch import Watch
from pipeline.stage.batches import access_of, eval_transform
from pipeline.stage.context import StageContext
from pipeline.stage.data import Stage
from pipeline.stage.data_workers import DataWorkers
from pipeline.transfer.few_shot_data import few_shot_of, open_few_shot


def few_shot_evaluation(
    context: StageContext,
    stage: Stage,
    *,
    engine: Engine,
    workers: DataWorkers,
    watch: Watch,
    say: Callable[[str], None],
) -> Callable[[int], dict[str, float]]:
    """Measures the sets that are due after a step, with the weights that become the stage's model; see
    `during_training`. Collective, as is what it returns; UserError as `open_few_shot`."""
    configs = few_shot_of(stage.recipe, stage=stage.name)
    if not configs:
        return lambda step: {}
    from pipeline.transfer.during_training import FewShotContext, FewShotMeasures

    recipe, store = stage.recipe, stage.data.store
    opened = context.on_main(
        lambda: open_few_shot(recipe, stage=stage.name, report=context.say, commands="run", store=store), takes="long"
    )
    sets = context.ranks.from_main(opened)
    assert sets is not None
    for line in (damage for each in sets for one in (each.train, each.eval) for damage in one.damage):
        say(line)
    shared = FewShotContext(
        engine=engine,
        ranks=context.ranks,
        plan=stage.plan,
        workers=workers,
        access=lambda shards: replace(access_of(stage, shards), on_corrupt="substitute"),
        transform=eval_transform(stage.config),
        progress=lambda step: watch.progress(step, status="few-shot evaluation"),
        say=say,
    )
    measures, ema = FewShotMeasures(configs, sets, shared), stage.config.ema
    return lambda step: measures(step, of_average=ema is not None and ema.model == "ema")
