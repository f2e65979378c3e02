"""Open a stage's shards, check them against each other, and order their samples. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from shardvit.data_shards.checking.fitness import assess
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.mixture import AnyOrder, make_order
from shardvit.data_shards.reading.opening import is_packed, manifest_of, open_shards
from shardvit.data_shards.sets.statistics import STATISTICS_FILE
from shardvit.data_shards.sets.statistics_summary import mean_and_std
from shardvit.data_shards.shards.holdout import shared_images
from shardvit.data_shards.shards.location import CommandRefused, Commands, redacted
from shardvit.data_shards.shards.shard_set import Portion, ShardSet, ShardsSpec, merge_shard_sets
from shardvit.data_shards.store.cache import CacheConfig, default_cache_folder
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import counted, named, parse_bytes, show_bytes
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.vocabulary import COLOUR_CHANNELS, LOSSES
from shardvit.pipeline.own_code.by_path import own_digests
from shardvit.pipeline.recipe.data import FewShotConfig, NormalisationConfig, ShardsConfig
from shardvit.pipeline.recipe.roles import missing_paths
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, chosen_metrics
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, PretrainStage, SelfSupervisedStage
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import OWN_SET, EvalMetric, StageName
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord

SAME_CLASSES = (
    "pack both from the same list of classes, or, if images are being appended to them, try again when that is done"
)
TRAINING_IMAGES, HELD_OUT_IMAGES = "training images", "held-out images"  # in the stage's records

Report = Callable[[str], None]


@dataclass(frozen=True)
class StageData:
    """Data sets of a training stage."""

    train: ShardSet  # mixed sets are concatenated
    train_sizes: tuple[tuple[int, ...], ...]  # samples per shard of each mixed set
    weights: tuple[float, ...] | None  # of the mixed sets
    held_out: Mapping[str, ShardSet]  # by name, the stage's own first, as "val"
    store: Store
    channels: int = 0  # of all images, read as they are; 0: as colours
    normalisation: Normalisation | None = None  # what the recipe asks for; None: nothing, or no statistics are there
    manifests: Mapping[str, str] = field(default_factory=dict)  # digests of packed sets', by location: the run's so far

    @property
    def eval(self) -> ShardSet:
        return self.held_out[OWN_SET]

    @property
    def also_eval(self) -> dict[str, ShardSet]:
        return {name: one for name, one in self.held_out.items() if name != OWN_SET}

    @property
    def recorded(self) -> dict[str, ShardSet]:
        """All sets by their names in the stage's records."""
        also = {f"{HELD_OUT_IMAGES} {name}": one for name, one in self.also_eval.items()}
        return {TRAINING_IMAGES: self.train, HELD_OUT_IMAGES: self.eval, **also}


@dataclass(frozen=True)
class Stage:
    """A training stage of a run."""

    recipe: Recipe
    name: StageName
    data: StageData
    plan: StagePlan
    run: RunFolder

    @property
    def config(self) -> TrainStage:
        return self.recipe.train_stage(self.name)

    @property
    def folder(self) -> Path:
        return self.run.stage(self.name)

    @property
    def checkpoints(self) -> Path:
        return self.run.checkpoints(self.name)

    @property
    def record(self) -> StageRecord:
        """stage.json; raises as `RunFolder.record`."""
        return self.run.record(self.name)

    def update(self, **changes: object) -> None:
        """Change fields of stage.json; raises as `RunFolder.update`."""
        self.run.update(self.name, **changes)

    @property
    def inputs(self) -> dict[str, str]:
        own = own_digests(self.config.model_dump(mode="json"))
        return {name: one.digest for name, one in self.data.recorded.items()} | own

    def order(self) -> AnyOrder:
        """Order of training samples; UserError as `training_order`."""
        return training_order(self.recipe, data=self.data, plan=self.plan)


def few_shot_of(recipe: Recipe, *, stage: StageName) -> tuple[FewShotConfig, ...]:
    """Few-shot sets of a stage; only pretrain and masked_autoencoder have any."""
    config = getattr(recipe.stages, stage)
    return config.few_shot if isinstance(config, PretrainStage | MaskedAutoencoderStage) else ()


def shards_spec(config: ShardsConfig, *, manifests: Mapping[str, str] = MappingProxyType({})) -> ShardsSpec:
    """Translate a set of the recipe for `data_shards`; `manifests` as in `StageData`."""
    portion = None
    if config.part is not None:
        assert config.hold_out is not None  # guaranteed by the recipe's validator
        portion = Portion(config.part, hold_out=config.hold_out)
    return ShardsSpec(
        location=config.shards,
        label=config.label,
        kind=config.kind,
        classes=Path(config.classes) if config.classes else None,
        portion=portion,
        digest=manifests.get(redacted(config.shards), ""),
    )


def training_order(recipe: Recipe, *, data: StageData, plan: StagePlan) -> AnyOrder:
    """Order the training samples; UserError if sizes do not fit, such as a mixed set with fewer images than lanes."""
    return make_order(
        data.train_sizes,
        weights=data.weights,
        seed=recipe.seed,
        lanes=plan.lanes,
        global_batch_images=plan.global_batch_images,
        window_images=recipe.data.shuffle_window_images,
        repeats=plan.repeats,
    )


def open_data(
    recipe: Recipe,
    *,
    stage: StageName,
    report: Report = print,
    commands: Commands = "refuse",
    manifests: Mapping[str, str] = MappingProxyType({}),
) -> StageData:
    """Open and check a stage's shards; `commands="run"` executes `pipe:` commands, only to train the user's own recipe.

    `manifests`, as in `StageData`, are those that the run began with: they are opened where they still are.
    UserError if shards are missing, unnamed or damaged beyond the recipe's limit, an evaluation set has other classes
    or training images, or the loss cannot use the labels; CommandRefused if a set is a command (the others opened).
    """
    config = recipe.train_stage(stage)
    if config.train is None or config.eval is None:
        raise UserError(missing_paths(recipe, stage=stage) or "")
    store = store_of(recipe, commands=commands)
    refused: list[CommandRefused] = []
    begun_with = {**manifests}

    def open_one(shards: ShardsConfig) -> list[ShardSet]:
        spec = shards_spec(shards, manifests=begun_with)
        damaged = "report" if recipe.data.max_corrupt_share > 0 else "refuse"
        try:
            opened = open_shards(spec, damaged=damaged, report=report, store=store)
            (source,) = opened.shards.sources
            if source.digest:  # for the other part of it, too, whatever is appended meanwhile
                begun_with[redacted(shards.shards)] = source.digest
            return [opened]
        except CommandRefused as error:
            refused.append(error)
            return []

    parts = [opened for each in config.train for opened in open_one(each)]
    weights = [each.weight for each in config.train if each.weight is not None]
    held_out = {OWN_SET: open_one(config.eval), **{name: open_one(each) for name, each in config.also_eval.items()}}
    if refused:
        raise CommandRefused("; ".join(dict.fromkeys(map(str, refused))))
    for shards in (shards for each in few_shot_of(recipe, stage=stage) for shards in (each.train, each.eval)):
        if (place := redacted(shards.shards)) not in begun_with and is_packed(shards.shards):
            begun_with[place] = manifest_of(shards.shards, store=store).digest
    sets = [*parts, *(each for found in held_out.values() for each in found)]
    channels = _channels(recipe, sets, config=config, stage=stage)
    data = StageData(
        channels=channels,
        normalisation=_normalisation(recipe, parts, config=config, channels=channels),
        train=merge_shard_sets(parts),
        train_sizes=tuple(part.shard_sizes for part in parts),
        weights=tuple(weights) or None,
        held_out={name: found[0] for name, found in held_out.items()},
        store=store,
        manifests=begun_with,
    )
    for shards in (data.train, *data.held_out.values()):
        _demand_few_lost(shards, max_share=recipe.data.max_corrupt_share)
    if config.init_weights is None and getattr(config, "start", "scratch") == "scratch":
        settled_normalisation(recipe, data, stage=stage)  # a mistake is said before any GPU time
    _demand_apart(data, config=config, stage=stage)
    if not isinstance(config, SelfSupervisedStage):  # which ignores labels
        for name, each in data.held_out.items():
            key = "eval" if name == OWN_SET else f"also_eval.{name}"
            _demand_like_labels(data.train, each, config=config, stage=stage, key=key)
            asked_metrics(config, shards=each, stage=stage)
    return data


def _channels(recipe: Recipe, sets: Sequence[ShardSet], *, config: TrainStage, stage: StageName) -> int:
    """Number of channels to read images as; 0: as colours. UserError if sets and model differ, or the stage needs
    colours."""
    channels = recipe.model.channels
    for each in sets:
        if each.channels not in (0, channels):
            raise UserError(
                f"stages.{stage}: the images of {each.source} have {each.channels} channels, and the model "
                f"{channels}: set model.channels={each.channels}"
            )
    if channels == COLOUR_CHANNELS and not any(each.channels for each in sets):
        return 0
    for problem in config.problems_with_channels(channels, key=f"stages.{stage}"):
        raise UserError(problem)
    return channels


def _normalisation(
    recipe: Recipe, train: Sequence[ShardSet], *, config: TrainStage, channels: int
) -> Normalisation | None:
    """Mean and deviation that the recipe asks for, over all training sets (by their weights, else their images)."""
    given, count = recipe.data.normalisation, recipe.model.channels
    if isinstance(given, NormalisationConfig):
        return Normalisation(given.mean, given.std)
    if given == "google":
        return Normalisation((0.5,) * count, (0.5,) * count)
    if given is None and not channels:
        return None
    assert config.train is not None
    sums, total = np.zeros((2, count)), 0.0
    for shards, one in zip(config.train, train, strict=True):
        moments = mean_and_std(shards.shards) if is_packed(shards.shards) else None
        if moments is None or len(moments.mean) != count:
            return None
        share, mean = shards.weight or one.num_samples, np.array(moments.mean)
        sums += share * np.stack([mean, mean**2 + np.array(moments.std) ** 2])
        total += share
    mean, square = sums / total
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return Normalisation(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1).tolist()))


def settled_normalisation(
    recipe: Recipe, data: StageData, *, stage: StageName, theirs: Normalisation | None = None
) -> Normalisation:
    """Choose what a model is begun with; `theirs`: that of the weights it starts from. UserError if a set's statistics
    are wanted, and are not there."""
    if theirs and len(theirs.mean) == recipe.model.channels and recipe.data.normalisation is None:
        return theirs
    if data.normalisation is not None:
        return data.normalisation
    if recipe.data.normalisation is None and not data.channels:
        return GOOGLES
    raise UserError(
        f"stages.{stage}.train: {data.train.source} lacks the {STATISTICS_FILE} of its channels' mean and deviation: "
        "shardvit check --decode --statistics writes it beside a manifest; or give data.normalisation, a mean and std"
    )


def store_of(recipe: Recipe, *, commands: Commands) -> Store:
    """Make the store that reads shards, with this host's cache of remote ones."""
    folder = recipe.data.cache.folder
    cache = CacheConfig(
        folder=Path(folder) if folder else default_cache_folder(), limit_bytes=parse_bytes(recipe.data.cache.limit)
    )
    return Store(cache, commands=commands)


def _demand_apart(data: StageData, *, config: TrainStage, stage: StageName) -> None:
    """UserError if train has images of eval (by the shards that both name), unless the recipe allows it."""
    train, held_out = data.train, data.eval
    if config.eval_overlap == "refuse" and (shared := shared_images(held_out, train)):
        raise UserError(
            f"stages.{stage}: {shared:,} of the {counted(held_out.num_samples, 'image')} of eval, {held_out.source}, "
            f"are trained on, too (train is {train.source}): name other shards, hold out a part (part, hold_out), or, "
            f"if intended, set stages.{stage}.eval_overlap=allow"
        )


def _demand_like_labels(train: ShardSet, held_out: ShardSet, *, config: TrainStage, stage: StageName, key: str) -> None:
    if train.classes != held_out.classes:
        raise UserError(
            f"stages.{stage}: the classes of train ({train.source}: {named(train.classes)}) and {key} "
            f"({held_out.source}: {named(held_out.classes)}) differ: {SAME_CLASSES}"
        )
    if train.is_multi_label != held_out.is_multi_label:
        raise UserError(f"stages.{stage}: one of train and {key} has a list of labels per image, the other has one")
    if train.is_multi_label and not LOSSES[config.loss_kind].takes_several_labels:
        use = " or ".join(name for name, loss in LOSSES.items() if loss.takes_several_labels)
        key = "loss" if config.loss == config.loss_kind else "loss.probabilities"
        raise UserError(
            f"stages.{stage}.{key} is {config.loss_kind}, but the images have several labels each: use {use}"
        )


def asked_metrics(config: TrainStage, *, shards: ShardSet, stage: StageName) -> tuple[EvalMetric, ...]:
    """List a held-out set's metrics besides loss and score; UserError if one is meaningless for its labels."""
    if isinstance(config, SelfSupervisedStage):
        return ()
    return chosen_metrics(
        config.built_in_metrics,
        label_kind="multi" if shards.is_multi_label else "single",
        num_classes=shards.num_classes,
        flag=f"stages.{stage}.metrics",
    )


def cache_advice(recipe: Recipe, *, data: StageData, plan: StagePlan, processes_per_node: int) -> str | None:
    """Warn if the cache is too small for the shuffle, so that shards are fetched repeatedly."""
    if data.train.is_local or None in (sizes := [shard.num_bytes for shard in data.train.shards]):
        return None
    fitness, _ = assess(
        data.train.shard_sizes,
        shard_bytes=[size or 0 for size in sizes],
        split=data.train.split,
        world_size=plan.world_size,
        lanes=plan.lanes,
        processes_per_node=processes_per_node,
        window_images=recipe.data.shuffle_window_images,
    )
    limit = parse_bytes(recipe.data.cache.limit)
    # Prefetched shards take space, too: store/prefetch.py.
    if fitness is None or fitness.window_bytes * 4 / 3 <= limit or data.train.num_bytes in range(limit):
        return None
    return (
        f"the shuffle reads {fitness.window_shards:,} shards ({show_bytes(fitness.window_bytes)}) at a time on a node, "
        f"and data.cache.limit is {recipe.data.cache.limit}: shards will be fetched more than once; raise the limit, "
        f"or lower data.shuffle_window_images ({recipe.data.shuffle_window_images:,}) or data.lanes ({plan.lanes})"
    )


def _demand_few_lost(shards: ShardSet, *, max_share: float) -> None:
    """Refuse damage at the start that would make `FaultLedger` stop later."""
    if shards.lost_samples > max_share * shards.num_samples:
        raise UserError(
            f"{shards.damage[0]}; {shards.lost_samples:,} of {shards.num_samples:,} images count as lost, more than "
            f"data.max_corrupt_share {max_share:g} allows: bring the shards back, or raise it"
        )
