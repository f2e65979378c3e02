"""What a stage's model is, before there are any weights: the record that it will be saved with.

A stage writes it into its stage.json when it begins, so that whoever looks at an unfinished stage needs no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from data_shards.loading.batch import Normalisation
from model.saved import SavedModelMeta
from model.vocabulary import HeadKind
from pipeline.recipe.schema import Recipe, StageName


def stage_model(
    recipe: Recipe,
    *,
    stage: StageName,
    classes: Sequence[str],
    head: HeadKind | Literal["masked_patch"],
    normalisation: Normalisation,
) -> SavedModelMeta:
    """The record of a training stage's model; `classes` names its outputs."""
    config = recipe.train_stage(stage)
    return SavedModelMeta(
        model=recipe.model,
        image_size=config.image_size,
        num_classes=len(classes),
        class_names=tuple(classes),
        head=head,
        mean=normalisation.mean,
        std=normalisation.std,
        loss=config.loss,
        eval_protocol=config.eval_protocol,
        eval_crop_share=config.eval_crop_share,
    )
