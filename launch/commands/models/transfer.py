"""`shardvit transfer`: the command line. Imports late, to keep --help fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.evaluation.transfer_options import Method, MethodOptions, TransferOptions

if TYPE_CHECKING:
    from shardvit.launch.evaluation.measuring import TransferOutcome
    from shardvit.pipeline.using.predict import Predictor


def transfer(
    model: Path,
    source: Annotated[str, Parameter(help="TRAIN_SHARDS, or TABLE.yaml")],
    eval_shards: str | None = None,
    /,
    *,
    method: Method | None = None,
    of_method: MethodOptions = MethodOptions(),  # noqa: B008 - frozen
    options: TransferOptions = TransferOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model's features on other images: few-shot, linear probe, kNN, or a table.

    --method fewshot: least squares on a few images of each class, as in the ViT paper and big_vision;
    probe: logistic regression on all of TRAIN_SHARDS; knn: cosine votes, as in DINO. EVAL_SHARDS are
    classified. Features are kept for the next call. MODEL: as for `shardvit predict`, except ONNX.
    --layer pre_logits: the last linear layer's input, as in big_vision; pooled: the trunk's output.
    TABLE.yaml lists data sets to measure, as in VTAB; run it again to resume:
      data_sets:
      - {name: pets, group: natural, train: SHARDS, eval: SHARDS, method: probe}

    Some examples:
        shardvit transfer runs/digits shards/pets/train shards/pets/val --method fewshot --shots 1 5 10
        shardvit transfer vit_b16.npz shards/pets/train shards/pets/val --method probe --images 1000
        shardvit transfer runs/vit_b16/pretrain vtab.yaml --images 1000
    """
    outcome = measured(model, source, eval_shards, method=method, of_method=of_method, options=options)
    from shardvit.launch.evaluation.measuring import tell

    return tell(outcome, options=options)


def measured(
    model: Path | Predictor,
    source: str,
    eval_shards: str | None,
    *,
    method: Method | None,
    of_method: MethodOptions,
    options: TransferOptions,
) -> TransferOutcome:
    """Measure without telling anybody; UserError as the command."""
    from shardvit.pipeline.using.find_model import refuse_own_model
    from shardvit.pipeline.using.hub import local_weights

    if isinstance(model, Path):
        refuse_own_model(local_weights(model), command="transfer")

    if isinstance(model, Path):
        model = local_weights(model)
    if eval_shards is None:
        _demand_table_options(source, method=method, of_method=of_method, options=options)
        options.check(model, command="transfer")
        from shardvit.launch.evaluation.measuring import measure_a_table

        return measure_a_table(model, Path(source), options=options)
    if method is None:
        raise UserError("--method: give fewshot, probe or knn")
    settings = of_method.settings(method)
    options.check(model, command=method)
    from shardvit.launch.evaluation.measuring import measure_one_set

    return measure_one_set(model, source, eval_shards, settings, options=options)


def _demand_table_options(
    source: str, *, method: Method | None, of_method: MethodOptions, options: TransferOptions
) -> None:
    if not source.endswith((".yaml", ".yml")):
        raise UserError(f"transfer: give EVAL_SHARDS behind {source}, or a table of data sets, TABLE.yaml")
    given = {"method": method, "name": options.name, "label": options.label, "classes": options.classes}
    for name in [*of_method.given(), *(name for name, value in given.items() if value is not None)]:
        raise UserError(f"--{name.replace('_', '-')}: {source} says it for each of its data sets: leave it out")
