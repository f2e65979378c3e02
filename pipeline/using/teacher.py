"""Find the teacher of `distill`, check that it fits the stage, and compute what it says of the student's pixels.

Reads any weights that `find_model` finds, and timm folders of other architectures; runs nobody's code. A teacher is no
part of the student: no gradients, no optimizer state, not in checkpoints; evaluation mode, weights never change. Each
process reads it once, on the CPU, and keeps it on its device: 2 bytes per parameter in bf16, 4 in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.counting.flops import account
from shardvit.model.formats.timm_classifier import is_other_timm, read_other_timm
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.using.find_model import find_model, find_record
from shardvit.pipeline.using.hub import local_weights
from shardvit.pipeline.using.start_weights import state_digest

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class TeacherFacts:
    """What is known of a teacher besides its weights."""

    origin: str
    image_size: int
    class_names: tuple[str, ...]
    normalisation: Normalisation
    parameters: int
    forward_flops: int  # per image


class Teacher(nn.Module):
    """Student's input, float32 [n, C, S, S] -> the teacher's logits, float32 [n, classes]; of kind feature its final
    tokens [n, T, D], each normed without scale and shift: patches, and first the class token if the student has one."""

    def __init__(self, model: nn.Module, facts: TeacherFacts, *, digest: str, config: DistillConfig) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.facts, self.digest, self.config = facts, digest, config
        self.compares_class_token = False
        self._dtype = torch.float32
        self._change: tuple[Tensor, Tensor] | None = None  # from the student's normalisation to the teacher's

    def settle(self, precision: str, *, device: torch.device, normalisation: Normalisation = GOOGLES) -> "Teacher":
        """Go to `device`, in bf16 unless `precision` (the engine's) or the recipe is fp32, with float32 BatchNorms as
        under autocast; `normalisation` of the student. Returns self."""
        exact = precision == "fp32" or self.config.precision == "fp32"
        self._dtype = torch.float32 if exact else torch.bfloat16
        norms = [(each, each.state_dict()) for each in self.model.modules() if isinstance(each, _BATCH_NORMS)]
        self.model.to(device, self._dtype)
        for norm, state in norms:
            norm.float().load_state_dict(state)
        ours, theirs = normalisation, self.facts.normalisation
        if len(ours.mean) != len(theirs.mean):
            raise UserError(
                f"distill.teacher takes {len(theirs.mean)} channels, and the images have {len(ours.mean)}: name another"
            )
        if (ours.mean, ours.std) != (theirs.mean, theirs.std):
            mean, std, to_mean, to_std = (
                torch.tensor(each, dtype=torch.float64)[:, None, None]
                for each in (ours.mean, ours.std, theirs.mean, theirs.std)
            )
            self._change = ((std / to_std).float().to(device), ((mean - to_mean) / to_std).float().to(device))
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if self._change is not None:
            images = images * self._change[0] + self._change[1]
        if images.shape[-1] != (size := self.facts.image_size):
            images = F.interpolate(images, size=(size, size), mode="bicubic", antialias=True)
        images = images.to(self._dtype)
        if self.config.kind != "feature":
            return self.model(images).float()
        assert isinstance(self.model, VisionTransformer)
        tokens, prefix = self.model.forward_features(images).float(), self.model.num_prefix_tokens
        compared = compared_tokens(tokens, prefix=prefix, class_token=self.compares_class_token)
        return F.layer_norm(compared, tokens.shape[-1:])


def compared_tokens(tokens: Tensor, *, prefix: int, class_token: bool) -> Tensor:
    """Take the patches of [n, T, D], behind `prefix` others, and before them the class token, the first, if asked."""
    patches = tokens[:, prefix:]
    return torch.cat([tokens[:, :1], patches], dim=1) if class_token else patches


def check_teacher(recipe: Recipe, *, stage: StageName, classes: Sequence[str] | None) -> TeacherFacts:
    """UserError if the teacher is missing, no model, or not of the stage's `classes` (None: unknown yet). Reads weights
    only where no record tells."""
    config = recipe.train_stage(stage).distillation
    assert config is not None
    key = f"stages.{stage}.distill.teacher"
    try:
        record = find_record(Path(config.teacher))
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if record is None:
        facts = load_teacher(recipe, stage=stage, classes=classes).facts
    else:
        facts = _facts(record, origin=redacted(config.teacher))
        _check(recipe, record, facts, stage=stage, classes=classes)
    return facts


def load_teacher(recipe: Recipe, *, stage: StageName, classes: Sequence[str] | None) -> Teacher:
    """Read the teacher, on the CPU in float32; UserError as `check_teacher`."""
    config = recipe.train_stage(stage).distillation
    assert config is not None
    key = f"stages.{stage}.distill.teacher"
    try:
        path = local_weights(config.teacher)
        if is_other_timm(path):
            other = read_other_timm(path)
            names = other.class_names or tuple(map(str, range(other.num_classes)))
            normalisation = Normalisation(mean=other.mean, std=other.std)
            parameters = sum(each.numel() for each in other.model.parameters())
            facts = TeacherFacts(str(path), other.image_size, names, normalisation, parameters, other.forward_flops)
            model, meta = other.model, None
        else:
            found = find_model(path)
            meta, facts = found.meta, _facts(found.meta, origin=found.origin)
            _check(recipe, meta, facts, stage=stage, classes=classes)  # before it is built
            model: Any = build_described(meta)
            model.load_state_dict(found.state)
    except UserError as error:
        raise UserError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from None
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None
    _check(recipe, meta, facts, stage=stage, classes=classes)
    return Teacher(model, facts, digest=state_digest(model.state_dict()), config=config)


def _facts(meta: SavedModelMeta, *, origin: str) -> TeacherFacts:
    parameters = flops = 0
    if meta.model.custom is None:
        head = meta.head if meta.head in ("mlp", "linear") else "linear"
        cost = account(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=head)
        parameters, flops = cost.parameters, cost.forward_flops
    normalisation = Normalisation(mean=meta.mean, std=meta.std)
    return TeacherFacts(origin, meta.image_size, meta.class_names, normalisation, parameters, flops)


def _check(
    recipe: Recipe,
    meta: SavedModelMeta | None,
    facts: TeacherFacts,
    *,
    stage: StageName,
    classes: Sequence[str] | None,
) -> None:
    config, key, origin = recipe.train_stage(stage), f"stages.{stage}.distill.teacher", facts.origin
    assert config.distillation is not None
    if meta is not None and meta.model.custom is not None:
        raise UserError(f"{key}: {origin} is a model of own code, which a teacher may not be: export its weights")
    theirs, ours = len(facts.normalisation.mean), recipe.model.channels
    if theirs != ours:
        raise UserError(f"{key}: {origin} sees {theirs} channels, and the model {ours}: give a teacher of as many")
    if meta is not None and meta.head == "masked_autoencoder":
        raise UserError(
            f"{key}: {origin} is a masked autoencoder: take its encoder, the model of a swap_head stage after it"
        )
    if config.distillation.kind == "feature":
        if meta is None or meta.model.kind != "vit":
            raise UserError(f"{key}: {origin} is no Vision Transformer, and kind feature needs its tokens: take soft")
        theirs, ours = meta.model.grid_size(facts.image_size), recipe.model.grid_size(config.image_size)
        if theirs != ours:
            raise UserError(
                f"{key}: {origin} has {theirs} x {theirs} patches, and the stage {ours} x {ours}: kind feature compares"
                " patch by patch, so give an image_size or patch_size with as many"
            )
        return
    if meta is not None and meta.head == "masked_patch":
        raise UserError(
            f"{key}: {origin} was trained to fill in masked patches and knows no classes: take kind feature"
        )
    if classes is None:
        return
    if len(facts.class_names) != len(classes):
        raise UserError(
            f"{key}: {origin} has {len(facts.class_names):,} classes, and the shards {len(classes):,}: give a teacher "
            "of the same classes, or take kind feature"
        )
    theirs, ours = ([name.removeprefix("LABEL_") for name in names] for names in (facts.class_names, classes))
    if theirs != ours and [str(number) for number in range(len(ours))] not in (theirs, ours):
        which = next(number for number, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
        raise UserError(
            f"{key}: class {which} of {origin} is {theirs[which]!r}, and of the shards {ours[which]!r}: give a teacher "
            "of the same classes in the same order, or pack the shards in its order (pack --classes)"
        )
