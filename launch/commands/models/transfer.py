"""The commands `shardvit fewshot`, `probe`, `knn` and `transfer`; imports are inside, so that --help is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from cyclopts import Parameter

from launch.evaluation.options import MostImages, SetOptions, TransferOptions
from launch.flags import demand_counts, flag_mistake
from launch.local.output import say
from pipeline.ranks.start_clock import StartClock

if TYPE_CHECKING:
    from pipeline.transfer.measure import SetMeasured
    from pipeline.transfer.results import TransferScore
    from pipeline.transfer.settings import FewShotSettings, KnnSettings, ProbeSettings, Settings

Kind = TypeVar("Kind", "FewShotSettings", "ProbeSettings", "KnnSettings")
OfOneSet = Annotated[SetOptions, Parameter(name="*")]
OfATable = Annotated[TransferOptions, Parameter(name="*")]


def fewshot(
    model: Path,
    train_shards: str,
    eval_shards: str,
    /,
    *,
    shots: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="", help="Images of each class.")] = (
        5,
        10,
        25,
    ),
    seeds: Annotated[int, Parameter(help="How often the images are drawn; the result is the mean.")] = 3,
    l2: Annotated[
        tuple[float, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            help="Strength of the regularisation; of several the one with the least leave-one-out error on the shots.",
        ),
    ] = (1024.0,),
    options: OfOneSet = SetOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model by few-shot least squares on its features, in closed form, as the ViT paper and big_vision do.

    A few images of each class of TRAIN_SHARDS are drawn by seed, a linear map
    onto the classes is fitted to the features before the model's head, and
    EVAL_SHARDS are classified by it. Of TRAIN_SHARDS only the images that were
    drawn are read. Features are kept, so that the same again takes seconds.
    MODEL is anything that `shardvit predict` takes but ONNX.

    Some examples:
        shardvit fewshot runs/digits/pretrain shards/digits-transfer/train shards/digits-transfer/val

        shardvit fewshot vit_b16.npz shards/pets/train shards/pets/val --shots 1 5 10 25 --json pets.json
    """
    from pipeline.transfer.settings import FewShotSettings

    settings = _settings(FewShotSettings, shots=shots, seeds=seeds, l2=l2)
    return _one_set(model, train_shards, eval_shards, settings, options=options)


def probe(
    model: Path,
    train_shards: str,
    eval_shards: str,
    /,
    *,
    c: Annotated[
        tuple[float, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            help="Inverse strength of the regularisation, scikit-learn's C; of several the best on the held-out part.",
        ),
    ] = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
    hold_out: Annotated[
        float | None,
        Parameter(help="Share of TRAIN_SHARDS that chooses C, and is then learned from, too; default: 0.2."),
    ] = None,
    options: OfOneSet = SetOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model by a linear probe: logistic regression on its features.

    Fitted on all of TRAIN_SHARDS (features of mean 0 and deviation 1), with C
    chosen on a part of them; scored on EVAL_SHARDS. MODEL is anything that
    `shardvit predict` takes but ONNX.

    Some examples:
        shardvit probe runs/digits/pretrain shards/digits-transfer/train shards/digits-transfer/val

        shardvit probe vit_b16.npz shards/pets/train shards/pets/val --images 1000
    """
    from pipeline.transfer.settings import ProbeSettings

    settings = _settings(ProbeSettings, c=c, **({} if hold_out is None else {"hold_out": hold_out}))
    return _one_set(model, train_shards, eval_shards, settings, options=options)


def knn(
    model: Path,
    train_shards: str,
    eval_shards: str,
    /,
    *,
    k: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="", help="So many neighbours vote.")] = (
        20,
    ),
    temperature: Annotated[float, Parameter(help="A neighbour's vote weighs exp(cosine / temperature).")] = 0.07,
    options: OfOneSet = SetOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model by k nearest neighbours of its features, as DINO: nothing is fitted.

    Each image of EVAL_SHARDS gets the class for which its K nearest of
    TRAIN_SHARDS, by cosine, vote. MODEL is anything that `shardvit predict`
    takes but ONNX.

    Some examples:
        shardvit knn runs/digits/pretrain shards/digits-transfer/train shards/digits-transfer/val --k 1 10 20
    """
    from pipeline.transfer.settings import KnnSettings

    settings = _settings(KnnSettings, k=k, temperature=temperature)
    return _one_set(model, train_shards, eval_shards, settings, options=options)


def transfer(
    model: Path,
    table: Path,
    /,
    *,
    images: MostImages = None,
    options: OfATable = TransferOptions(),  # noqa: B008 - frozen
) -> int:
    """Measure a model on a table of small data sets, as VTAB does: one command, one table of results.

    TABLE is a YAML file:

      method: probe    # of the sets that say none: fewshot, probe or knn
      data_sets:
      - {name: pets, group: natural, train: SHARDS, eval: SHARDS}
      - {name: dmlab, train: SHARDS, eval: SHARDS, method: fewshot, shots: 5}

    with VTAB's groups natural, specialized and structured, or none, and the keys
    of each method as the flags of its command. The result is kept after each set:
    interrupted, the same command goes on. MODEL is anything that `shardvit
    predict` takes but ONNX.

    Some examples:
        shardvit transfer runs/vit_b16/pretrain vtab.yaml --images 1000
    """
    demand_counts(images=images)
    from data_shards.store.cache import CacheConfig
    from data_shards.store.store import Store
    from pipeline.transfer.results import SetGroup
    from pipeline.transfer.table import TableProgress, mean_score, measure_table, open_table, read_table, set_scores

    options.check(model, command="transfer")
    content = read_table(table)
    sets = open_table(content, store=Store(CacheConfig()), say=say)
    with closing(StartClock("transfer", say=say, part="importing libraries")) as clock:
        from launch.evaluation.session import Session, spread, tell

        session = Session(model, command="transfer", options=options, clock=clock)
        name = (content.name or table.stem) + (f"-{images}" if images else "")

        def told(progress: TableProgress) -> None:
            if progress.measured is not None:
                tell(progress.measured)
            done = "done" if progress.measured is not None else "done before"
            say(f"{progress.number} of {progress.of}: {progress.name} {done}")

        file = session.record_file(name)
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        record = measure_table(
            content,
            sets,
            features=session.features,
            record=session.record(name),
            file=file,
            most_images=images,
            told=told,
        )
        scores = set_scores(record)
        groups = [
            group for group in (*get_args(SetGroup), None) if any(each.group == group for each in record.data_sets)
        ]
        rows = [("data set", "classes", "train", "eval", "method", "top-1", "±")]
        for group in groups:
            for used in record.data_sets:
                if used.group == group:
                    score = scores[used.name]
                    rows.append(
                        (
                            used.name,
                            f"{used.num_classes:,}",
                            f"{used.train_images:,}",
                            f"{used.eval_images:,}",
                            _how(score),
                            f"{score.value:.4f}",
                            spread(score),
                        )
                    )
            if group is not None:
                rows.append((f"mean of {group}", "", "", "", "", f"{mean_score(record, group=group):.4f}", ""))
        rows.append(("mean of all", "", "", "", "", f"{record.mean:.4f}", ""))
        return session.finish(
            record, file, rows=rows, footer=(), params={"table": str(table), "images": images, "method": content.method}
        )


def _one_set(
    model: Path,
    train_shards: str,
    eval_shards: str,
    settings: Settings,
    *,
    options: SetOptions,
) -> int:
    from dataclasses import replace

    from data_shards.store.cache import CacheConfig
    from data_shards.store.store import Store
    from pipeline.recipe.data import ShardsConfig
    from pipeline.transfer.data_sets import TransferSet, check_sets, open_set

    options.check(model, command=settings.method)
    store = Store(CacheConfig())
    opened = [
        open_set(
            ShardsConfig.model_construct(
                shards=each, label=options.label, classes=str(options.classes) if options.classes else None
            ),
            store=store,
            say=say,
        )
        for each in (train_shards, eval_shards)
    ]
    data = TransferSet(options.name or opened[1].name, *opened, store=store)
    check_sets(data)
    with closing(StartClock(settings.method, say=say, part="importing libraries")) as clock:
        from launch.evaluation.session import Session, tell
        from pipeline.transfer.measure import measure

        session = Session(model, command=settings.method, options=options, clock=clock)
        measured = measure(session.features, data, settings, most_images=options.images)
        tell(measured)
        record = replace(session.record(data.name), data_sets=(measured.used,), results=measured.scores)
        file = session.keep(record)
        used = measured.used
        footer = (
            f"{used.eval_images:,} images of {used.num_classes:,} classes"
            + (f", {used.damaged_images:,} more could not be read" if used.damaged_images else "")
            + f"; features: {record.layer}"
            + (
                "; ±: standard deviation over the seeds" if any(len(each.values) > 1 for each in record.results) else ""
            ),
        )
        return session.finish(
            record,
            file,
            rows=_rows(measured),
            footer=footer,
            params={**settings.model_dump(mode="json"), "images": options.images},
            more={"shots": _shots_as_json(measured, data.train.classes)} if measured.shots else None,
        )


def _rows(measured: SetMeasured) -> list[tuple[str, ...]]:
    from launch.evaluation.session import spread

    first = measured.scores[0]
    if first.method == "fewshot":
        heading = ("shots", "images", "l2", "top-1", "±", "seeds")
        return [
            heading,
            *(
                (
                    str(each.settings["shots"]),
                    _numbers(each.settings["images"]),
                    _numbers(each.settings["l2"]),
                    f"{each.value:.4f}",
                    spread(each),
                    str(each.settings["seeds"]),
                )
                for each in measured.scores
            ),
        ]
    names = list(dict.fromkeys(each.metric for each in measured.scores))
    keys = list(first.settings)
    by_settings: dict[tuple[str, ...], dict[str, TransferScore]] = {}
    for each in measured.scores:
        by_settings.setdefault(tuple(_numbers(each.settings[key]) for key in keys), {})[each.metric] = each
    shown = {"top1": "top-1", "top5": "top-5"}
    rows = [(*keys, "images", *(shown.get(each, each) for each in names))]
    for values, scores in by_settings.items():
        rows.append((*values, f"{measured.used.train_images:,}", *(f"{scores[each].value:.4f}" for each in names)))
    return rows


def _settings(kind: type[Kind], **given: Any) -> Kind:
    """UserError for a value that is out of range, with the flag's name."""
    from pydantic import ValidationError

    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise flag_mistake(error) from None


def _numbers(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_numbers, dict.fromkeys(value)))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _how(score: TransferScore) -> str:
    match score.method:
        case "fewshot":
            return f"{score.settings['shots']}-shot"
        case "probe":
            return f"probe, C {_numbers(score.settings['c'])}"
        case "knn":
            return f"kNN, k {score.settings['k']}"


def _shots_as_json(measured: SetMeasured, classes: Sequence[str]) -> Mapping[str, Mapping[str, list[int]]]:
    """Seed -> class -> the numbers of its samples in TRAIN_SHARDS, in the order drawn: the first 5 are the 5 shots."""
    return {
        str(seed): {classes[label]: samples for label, samples in by_class.items()}
        for seed, by_class in measured.shots.items()
    }
