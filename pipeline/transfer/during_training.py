"""Measure few-shot accuracy at a stage's evaluations, on all ranks together, without affecting training.

Each rank computes features of its part of both sets with the engine's own forward pass (ZeRO 3 included). The ranks
exchange the shots' features, share the fits, and count the hits in their parts of the held-out set. The first time pays
for decoding; decoded images then stay in memory. Training's random numbers are untouched.

Nothing here may end a run: unreadable images are left out; missing shards or non-finite features cost a line and the
metric.
"""

import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch, batch_of
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.reading.shard_reader import label_column
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.text import parse_bytes
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.vocabulary import COLOUR_CHANNELS
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.watch import Watch
from shardvit.pipeline.recipe.data import FewShotConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.vocabulary import FeatureLayer
from shardvit.pipeline.stage.batches import access_of, eval_transform
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.data_workers import DataWorkers
from shardvit.pipeline.stage.stage_data import Stage, few_shot_of
from shardvit.pipeline.transfer.classifiers import LinearClassifier, fit_least_squares
from shardvit.pipeline.transfer.features import Features, Int64s, choose_shots, extract, merged, shot_features
from shardvit.pipeline.transfer.results import few_shot_name
from shardvit.pipeline.transfer.settings import TransferSet, open_few_shot


@dataclass(frozen=True)
class FewShotContext:
    """Parts of a stage that its few-shot sets use."""

    engine: Engine
    ranks: Ranks
    plan: StagePlan
    workers: DataWorkers
    access: Callable[[ShardSet], Access]  # reads a set, skipping damaged samples
    transform: EvalTransform
    normalisation: Normalisation
    progress: Callable[[int], None]  # called with the step at each batch
    say: Callable[[str], None]


class FewShotMeasures:
    """All few-shot sets of a stage."""

    def __init__(
        self, configs: tuple[FewShotConfig, ...], data: tuple[TransferSet, ...], context: FewShotContext
    ) -> None:
        self._sets = [_FewShotSet(*pair, context) for pair in zip(configs, data, strict=True)]
        self._context = context

    def __call__(self, step: int, *, of_average: bool) -> dict[str, float]:
        """Measure the sets due at `step`; collective, equal on all ranks. A failing set has no metric."""
        context, metrics = self._context, dict[str, float]()
        due = [each for number, each in enumerate(self._sets) if context.plan.few_shot_after(step, number=number)]
        if not due:
            return metrics
        module = context.engine.module
        module.eval()
        try:
            with context.engine.averaged() if of_average else nullcontext():
                for each in due:
                    metrics |= each.measure(step)
        finally:
            module.train()
        return metrics


class _NotMeasured(Exception):
    """Why a set has no metric this time; raised on all ranks together."""


class _FewShotSet:
    def __init__(self, config: FewShotConfig, data: TransferSet, context: FewShotContext) -> None:
        self._config, self._data, self._context = config, data, context
        self._labels: Int64s | None = None  # of the training set; UNKNOWN for damaged images
        self._train: _DecodedPart | None = None
        self._held_out: _DecodedPart | None = None
        self._damaged = 0
        self._has_told = False

    def measure(self, step: int) -> dict[str, float]:
        name, say = self._config.name, self._context.say
        try:
            found = self._measured(step)
        except _NotMeasured as why:
            say(f"step {step}: few-shot {name} is not measured: {why}")
            return {}
        shown = ", ".join(f"{shots}-shot {value:.4f}" for shots, value in found.items())
        say(f"step {step}: {name}, top-1 of a linear fit: {shown}")
        return {f"val/{few_shot_name(name, shots=shots)}": value for shots, value in found.items()}

    def _measured(self, step: int) -> dict[int, float]:
        config, context, ranks = self._config, self._context, self._context.ranks
        if self._labels is None:
            self._labels = self._read_labels()
        train, _ = shot_features(
            self._labels,
            shots=max(config.shots),
            seeds=config.seeds,
            features_of=lambda samples: self._train_features(samples, step),
        )
        cases = [(shots, seed) for shots in config.shots for seed in range(config.seeds)]
        mine, problem = dict[tuple[int, int], LinearClassifier](), ""
        for shots, seed in cases[ranks.place.rank :: ranks.place.world_size]:
            context.progress(step)
            rows = train.rows_of(choose_shots(self._labels, shots=shots, seed=seed))
            try:
                mine[shots, seed] = self._fit(train.values[rows], train.labels[rows])
            except torch.linalg.LinAlgError as error:
                problem = f"its eigenvalues are not found ({error})"
        self._agree(problem)
        fitted = {key: each for part in ranks.gather_objects(mine) for key, each in part.items()}
        classifiers = [fitted[case].on(context.engine.device) for case in cases]
        if self._held_out is None:
            self._held_out = _DecodedPart(self._data.eval, None, config=config, context=context)
        counts = torch.zeros(len(cases) + 1, dtype=torch.float64)
        is_finite = True
        for part in self._held_out.features(step):
            is_finite = is_finite and bool(part.values.isfinite().all())
            counts[-1] += len(part.labels)
            for number, classifier in enumerate(classifiers):
                counts[number] += int((classifier(part.values).argmax(dim=1).cpu() == part.labels).sum())
        self._agree(self._held_out.problem or ("" if is_finite else "features are not finite"))
        *right, images = ranks.gather(counts).sum(dim=0).tolist()
        if not images:
            raise _NotMeasured(f"no image of {self._data.eval.source} can be read")
        accuracy = {case: count / images for case, count in zip(cases, right, strict=True)}
        self._tell_damage(self._data.eval.num_samples - int(images))
        return {
            shots: statistics.fmean(accuracy[shots, seed] for seed in range(config.seeds)) for shots in config.shots
        }

    def _read_labels(self) -> Int64s:
        """Read the training set's labels, one part per rank; collective."""
        place, shards = self._context.ranks.place, self._data.train
        block = -(-shards.num_samples // place.world_size)
        first, own, problem = min(place.rank * block, shards.num_samples), np.zeros(0, dtype=np.int64), ""
        try:
            own = label_column(shards, store=self._context.access(shards).store, first=first, stop=first + block)
        except UserError as error:
            problem = str(error)
        self._agree(problem)
        return np.concatenate(self._context.ranks.gather_objects(own))

    def _fit(self, values: torch.Tensor, labels: torch.Tensor) -> LinearClassifier:
        for device in (self._context.engine.device, torch.device("cpu")):
            try:
                fitted = fit_least_squares(
                    values, labels, num_classes=self._data.train.num_classes, l2=[self._config.l2], device=device
                )
                return fitted.on(torch.device("cpu"))
            except torch.OutOfMemoryError:  # training fills the GPU's memory
                continue
        raise AssertionError("unreachable: CPUs do not raise OutOfMemoryError")

    def _train_features(self, samples: Int64s, step: int) -> Features:
        """Features of these training images, on every rank; collective."""
        if not len(samples):
            raise _NotMeasured(f"no image of {self._data.train.source} can be read")
        if self._train is None:
            self._train = _DecodedPart(self._data.train, samples, config=self._config, context=self._context)
        parts = list(self._train.features(step))
        self._agree(self._train.problem)
        train = merged([each for some in self._context.ranks.gather_objects(parts) for each in some], samples=samples)
        if not train.values.isfinite().all():
            raise _NotMeasured("features are not finite")
        if len(train.damaged):
            self._damaged += len(train.damaged)
            self._train = None  # replacements are drawn
        return train

    def _agree(self, problem: str) -> None:
        """Raise `_NotMeasured` on all ranks if one has a problem; collective."""
        if found := next(filter(None, self._context.ranks.gather_objects(problem)), ""):
            raise _NotMeasured(found)

    def _tell_damage(self, held_out: int) -> None:
        count = self._damaged + held_out
        if count and not self._has_told:
            self._has_told = True
            self._context.say(f"few-shot {self._config.name}: {count:,} images cannot be read and are left out")


class _DecodedPart:
    """This rank's part of a set, decoded within `keep_decoded`. `problem`: why features are incomplete, or ""."""

    def __init__(
        self, shards: ShardSet, samples: Int64s | None, *, config: FewShotConfig, context: FewShotContext
    ) -> None:
        place = context.ranks.place
        self._context = context
        self._layer: FeatureLayer = config.layer
        self._part = EvalBatches(
            access := context.access(shards),
            transform=context.transform,
            rank=place.rank,
            world_size=place.world_size,
            batch_size=context.plan.micro_batch_size,
            samples=samples,
        )
        self._left_bytes = parse_bytes(config.keep_decoded) // 2  # the other half is for the other set
        self._kept: list[Batch] = []
        self._channels = access.channels
        self.problem = ""

    def features(self, step: int) -> Iterator[Features]:
        """Features of each batch on the CPU; equally many forward passes on all ranks, even after errors."""
        context, engine = self._context, self._context.engine
        self.problem = ""

        def forward(images: torch.Tensor) -> None:
            context.progress(step)
            engine.predict(images)

        return extract(
            self._batches(),
            model=engine.module,
            forward=forward,
            layer=self._layer,
            device=engine.device,
            dtype=engine.input_dtype,
            normalisation=context.normalisation,
        )

    def _batches(self) -> Generator[Batch]:
        """Yield all batches; after a read error, empty ones, since other ranks wait."""
        yield from self._kept
        number, workers = len(self._kept), self._context.workers
        try:
            with closing(eval_batches(self._part, workers=workers.count, kind=workers.kind, first=number)) as stream:
                for batch in stream:
                    number += 1
                    if number == len(self._kept) + 1 and batch.images.nbytes <= self._left_bytes:
                        self._left_bytes -= batch.images.nbytes
                        # copy, to free scarce shared memory
                        own = batch.images.clone() if batch.images.is_shared() else batch.images
                        self._kept.append(replace(batch, images=own))
                    yield batch
        except UserError as error:
            self.problem = str(error)
        count, size = self._context.plan.micro_batch_size, self._context.transform.image_size
        for _ in range(number, len(self._part)):
            kind = torch.float32 if self._channels else torch.uint8
            pixels = torch.zeros(count, size, size, self._channels or COLOUR_CHANNELS, dtype=kind)
            blank = batch_of(pixels, keys=("",) * count)
            yield replace(blank, counted=torch.zeros_like(blank.counted))


def few_shot_evaluation(
    context: StageContext,
    stage: Stage,
    *,
    engine: Engine,
    workers: DataWorkers,
    watch: Watch,
    say: Callable[[str], None],
    normalisation: Normalisation = GOOGLES,
) -> Callable[[int], dict[str, float]]:
    """Return the function that measures the sets due after a step, with the weights that become the stage's model. Both
    are collective. UserError as in `open_few_shot`."""
    configs = few_shot_of(stage.recipe, stage=stage.name)
    if not configs:
        return lambda step: {}
    recipe = stage.recipe
    opened = context.on_main(
        lambda: open_few_shot(
            recipe,
            stage=stage.name,
            report=context.say,
            commands="run",
            store=stage.data.store,
            manifests=stage.data.manifests,
        ),
        takes="long",
    )
    sets = context.ranks.from_main(opened)
    assert sets is not None
    for each in (one for pair in sets for one in (pair.train, pair.eval)):
        if each.channels not in (0, channels := stage.data.channels):
            raise UserError(
                f"stages.{stage.name}.few_shot: the images of {each.source} have {each.channels} channels, and those "
                f"of train {channels or 'three of 8 bits'}: pack both with the same --channels"
            )
    for line in (damage for each in sets for one in (each.train, each.eval) for damage in one.damage):
        say(line)
    shared = FewShotContext(
        engine=engine,
        ranks=context.ranks,
        plan=stage.plan,
        workers=workers,
        access=lambda shards: replace(access_of(stage, shards), on_corrupt="substitute"),
        transform=eval_transform(stage.config),
        normalisation=normalisation,
        progress=lambda step: watch.progress(step, status="few-shot evaluation"),
        say=say,
    )
    measures, ema = FewShotMeasures(configs, sets, shared), stage.config.ema
    return lambda step: measures(step, of_average=ema is not None and ema.model == "ema")
