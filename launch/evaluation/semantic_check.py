"""Run `shardvit check --features`: load the model, and find semantic duplicates of each split."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError

if TYPE_CHECKING:
    from shardvit.data_shards.checking.near_duplicates.matches import Matches
    from shardvit.data_shards.images.decode import PixelLimit
    from shardvit.data_shards.shards.shard_set import ShardsSpec
    from shardvit.data_shards.store.store import Store

SEMANTIC_FILE = "semantic.jsonl"


@Parameter(name="*")
@dataclass(frozen=True)
class SemanticOptions:
    """Flags for semantic duplicates."""

    features: Annotated[Path | None, Parameter(help="MODEL: list images alike by its features; no problems.")] = None
    similar: Annotated[float | None, Parameter(help="For --features: least cosine; default: 0.95.")] = None

    def check(self) -> None:
        """UserError for a bad number, or no model."""
        if self.similar is not None and not (self.features and -1 < self.similar <= 1):
            raise UserError(f"--similar {self.similar}: give a cosine, such as 0.95, and --features MODEL")
        if self.features:
            from shardvit.pipeline.using.find_model import find_record, refuse_own_model
            from shardvit.pipeline.using.hub import local_weights

            refuse_own_model(local_weights(self.features), command="check")
            find_record(local_weights(self.features))

    def matches(self, spec: ShardsSpec, *, store: Store, limit: PixelLimit) -> list[tuple[str, Matches]]:
        """Find those of each split, by its name; UserError if the model or a split cannot be opened."""
        if self.features is None:
            return []  # before torch is imported
        from shardvit.data_shards.processes import num_cores
        from shardvit.data_shards.reading.opening import open_shards, splits_below
        from shardvit.launch.local.output import say, say_model
        from shardvit.pipeline.ranks.start_clock import StartClock
        from shardvit.pipeline.transfer.features import FeatureStore
        from shardvit.pipeline.transfer.semantic import semantic_matches
        from shardvit.pipeline.using.predict import open_predictor

        with closing(StartClock("check", say=say, part="loading the model")) as clock:
            predictor = open_predictor(self.features)
            say_model(self.features, origin=predictor.origin, notes=predictor.notes)
            workers = min(num_cores(), 16)
            model = FeatureStore(predictor, workers=workers, pixel_limit=limit, say=say, clock=clock)
            places = splits_below(spec.location, store=store).values() or (spec.location,)
            sets = [
                open_shards(replace(spec, location=place), damaged="report", store=store, report=say)
                for place in places
            ]
            similar = 0.95 if self.similar is None else self.similar
            return [(each.split, semantic_matches(model, each, similar=similar, store=store)) for each in sets]
