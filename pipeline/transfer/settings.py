"""Settings of the three measures and of a table of data sets; open and check the sets. Imports no torch.

few-shot: as big_vision's evaluator `fewshot_lsr`: shots 1, 5, 10 and 25 of each class, l2 2^10, 3 seeds.
probe: multinomial logistic regression; C on a logarithmic grid, as for CLIP (arXiv 2103.00020, appendix A.3).
kNN: as DINO's (arXiv 2104.14294, appendix F): k 20, temperature 0.07, cosine.

Mistakes in shards are reported before anything is loaded or started.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.location import Commands
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.pipeline.recipe.data import Counts, OneSet, ShardsConfig, Strengths
from shardvit.pipeline.recipe.duration import Strict
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.stage_data import SAME_CLASSES, few_shot_of, shards_spec, store_of
from shardvit.pipeline.transfer.results import SetGroup


class FewShotSettings(Strict):
    """Least squares on a few images of each class."""

    method: Literal["fewshot"] = "fewshot"
    shots: Counts = (5, 10, 25)
    """Images per class."""
    l2: Strengths = (1024.0,)
    """Regularisation strength; of several, the one with the least leave-one-out error on the shots."""
    seeds: int = Field(default=3, ge=1, le=1000)
    """Number of draws; the result is their mean."""


class ProbeSettings(Strict):
    """Logistic regression on all training images."""

    method: Literal["probe"] = "probe"
    c: Strengths = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
    """scikit-learn's C, the inverse regularisation strength, on features of mean 0 and deviation 1; of several, the one
    with the best top-1 on `hold_out` of the training images."""
    hold_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the training images held out to choose C; the final fit uses all."""

    def problems(self) -> Iterator[str]:
        if len(self.c) == 1:
            yield from self.ignored("hold_out", why="with a single c, which nothing has to choose")


class KnnSettings(Strict):
    """The vote of the nearest training images."""

    method: Literal["knn"] = "knn"
    k: Counts = (20,)
    """Neighbours that vote."""
    temperature: float = Field(default=0.07, gt=0, le=1e6)
    """A neighbour's vote weighs exp(cosine / temperature)."""


Settings = FewShotSettings | ProbeSettings | KnnSettings


class TableSet(Strict):
    """A data set of a table."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
    group: SetGroup | None = None
    """VTAB's groups; each gets its own mean."""
    train: OneSet
    eval: OneSet


class FewShotSet(TableSet, FewShotSettings):
    """A data set for few-shot least squares; the first of `shots` gives its score in the mean."""

    shots: Counts = (5,)


class ProbeSet(TableSet, ProbeSettings):
    """A data set for a linear probe."""


class KnnSet(TableSet, KnnSettings):
    """A data set for kNN; the first of `k` gives its score in the mean."""


AnySet = Annotated[FewShotSet | ProbeSet | KnnSet, Field(discriminator="method")]


class TransferTable(Strict):
    """A table of data sets for `shardvit transfer`."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)] | None = None
    """Name of the result; default: the file's."""
    method: Literal["fewshot", "probe", "knn"] = "probe"
    """Default method of the data sets."""
    data_sets: tuple[AnySet, ...] = Field(min_length=1, max_length=1000)

    @model_validator(mode="before")
    @classmethod
    def _method_of_each(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or not isinstance(tree.get("data_sets"), list):
            return tree
        method = tree.get("method", "probe")
        sets = [{"method": method, **each} if isinstance(each, dict) else each for each in tree["data_sets"]]
        for each in sets:
            if isinstance(each, dict) and each["method"] == "finetune":
                raise ValueError(
                    "method finetune is not measured here, as it trains: `shardvit run RECIPE finetune=vtab train=... "
                    "eval=...` does it, `shardvit sweep` with a grid; take fewshot, probe or knn"
                )
        return {**tree, "data_sets": sets}

    def problems(self) -> Iterator[str]:
        names = [each.name for each in self.data_sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"data set {twice[0]} is named twice: give each its own name"


Say = Callable[[str], None]


@dataclass(frozen=True)
class TransferSet:
    """A data set to transfer to: opened shards with one label per image and equal classes, else UserError."""

    name: str
    train: ShardSet
    eval: ShardSet
    store: Store | None = None
    group: SetGroup | None = None

    def __post_init__(self) -> None:
        for each in (self.train, self.eval):
            if each.is_multi_label:
                raise UserError(
                    f"{each.source} has a list of labels for each image: give a set with one label an image"
                )
        if self.train.classes != self.eval.classes:
            raise UserError(
                f"the classes of {self.train.source} ({self.train.num_classes}) and {self.eval.source} "
                f"({self.eval.num_classes}) differ: {SAME_CLASSES}"
            )


def open_set(shards: ShardsConfig, *, store: Store, say: Say) -> ShardSet:
    """Open a set the user names; report and leave out damage. UserError if it is missing or broken."""
    if shards.weight is not None:
        raise UserError(f"{shards.shards}: a weight has no effect on a single set of shards: leave it out")
    opened = open_shards(shards_spec(shards), damaged="report", report=say, store=store)
    for damage in opened.damage:
        say(damage)
    return opened


def open_few_shot(
    recipe: Recipe,
    *,
    stage: StageName,
    report: Say = print,
    commands: Commands = "refuse",
    store: Store | None = None,
    manifests: Mapping[str, str] = MappingProxyType({}),
) -> tuple[TransferSet, ...]:
    """Open a stage's sets in the recipe's order; `commands` as in `stage_data.open_data`, `manifests` as it returns
    them. CommandRefused if one is a command; UserError if shards are missing or broken, classes differ, or an image has
    several labels."""
    found: list[TransferSet] = []
    for number, each in enumerate(few_shot_of(recipe, stage=stage)):
        store = store or store_of(recipe, commands=commands)
        train, held_out = (
            open_shards(shards_spec(shards, manifests=manifests), damaged="report", report=report, store=store)
            for shards in (each.train, each.eval)
        )
        try:
            found.append(TransferSet(each.name, train, held_out))
        except UserError as error:
            raise UserError(f"stages.{stage}.few_shot.{number} ({each.name}): {error}") from None
    return tuple(found)
