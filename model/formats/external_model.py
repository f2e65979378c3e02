"""A model read from another project's file, under our names: the result of every reader; and its adaptation.

`Names` maps a library's names by tables of prefixes, both ways. What shapes do not tell comes from the format
(`Semantics`), the file's record, or the user (`UserHints`, a `ModelConfig`). `adapt` changes resolution and classes as
the paper does (section 3.2): position embeddings are interpolated, "we remove the whole pre-trained prediction head and
attach a zero-initialized D x K feedforward layer". Unchanged tensors are shared with the input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, check_state, first_mistake
from shardvit.model.saved.state_shapes import StateSizes, read_sizes, shapes_of, variant_of
from shardvit.model.variants import VARIANTS, VitSizes
from shardvit.model.vocabulary import (
    COLOUR_CHANNELS,
    ClassTokenPosition,
    Gelu,
    HeadKind,
    Interpolation,
    LossKind,
    PositionKind,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Names:
    """A library's parameter names."""

    outside: Mapping[str, str]  # their prefix -> ours, outside blocks
    block: str  # prefix of a block's parts, with {} for its number
    inside: Mapping[str, str]  # their prefix -> ours, within a block
    other_blocks: tuple[str, ...] = ()  # these two: other releases, read only
    other_inside: Mapping[str, str] | None = None

    def ours(self, name: str) -> str:
        """Our name of a parameter; unknown names stay."""
        for block in (self.block, *self.other_blocks):
            if match := re.match(re.escape(block).replace(r"\{\}", r"(\d+)"), name):
                part = _changed(name[match.end() :], {**self.inside, **(self.other_inside or {})})
                return f"blocks.{match[1]}.{part}" if part else name
        return _changed(name, self.outside) or name

    def theirs(self, name: str) -> str:
        if not name.startswith("blocks."):
            return _changed(name, {ours: theirs for theirs, ours in self.outside.items()}) or name
        _, index, part = name.split(".", 2)
        return self.block.format(index) + str(_changed(part, {ours: theirs for theirs, ours in self.inside.items()}))


def _changed(name: str, prefixes: Mapping[str, str]) -> str | None:
    return next((new + name[len(old) :] for old, new in prefixes.items() if name.startswith(old)), None)


def add_qkv_biases(state: dict[str, Tensor]) -> list[str]:
    """Add zeros for missing q, k and v biases; returns notes."""
    weights = [name for name in state if name.endswith(".attn.qkv.weight")]
    if not weights or any(name.endswith(".attn.qkv.bias") for name in state):
        return []
    for name in weights:
        state[name.replace(".weight", ".bias")] = state[name].new_zeros(state[name].shape[0])
    return ["q, k and v have no biases: they became zeros, which training would move"]


def move_class_row(state: Mapping[str, Tensor], *, config: ModelConfig) -> dict[str, Tensor]:
    """Convert position embeddings with or without rows for class and register tokens to those of `config`; logits stay
    the same. Missing rows become zeros; superfluous ones are added to the tokens in float32, as big_vision does."""
    from torch.nn import functional

    state = dict(state)
    names = [name for name in ("cls_token", "reg_token", "dist_token") if name in state]
    if not names or "pos_embed" not in state:
        return state
    counts = [state[name].shape[1] for name in names]
    has_rows = math.isqrt(state["pos_embed"].shape[1]) ** 2 != state["pos_embed"].shape[1]
    if config.prefix_rows and not has_rows:
        state["pos_embed"] = functional.pad(state["pos_embed"], (0, 0, sum(counts), 0))
    elif has_rows and not config.prefix_rows:
        *rows, state["pos_embed"] = (
            state["pos_embed"].float().split([*counts, state["pos_embed"].shape[1] - sum(counts)], dim=1)
        )
        for name, of_token in zip(names, rows, strict=True):
            state[name] = state[name].float() + of_token
    return state


def with_all_positions(state: Mapping[str, Tensor], *, meta: SavedModelMeta) -> dict[str, Tensor]:
    """Give `pos_embed` a position for every token: fixed ones included, zeros for a class token without."""
    from shardvit.model.positions.embedding import fixed_numbers

    state = {**state, **fixed_numbers(meta.model, image_size=meta.image_size)}
    config = meta.model.with_learned_positions.model_copy(update={"class_token_position": "learned"})
    return move_class_row(state, config=config)


def plain_vit_objection(config: ModelConfig, *, whose: str) -> str | None:
    """Why a ViT with only a class token and learned 1-D positions cannot hold this trunk, or None."""
    config = config.with_learned_positions
    if config.kind == "resnet" or config.sizes.resnet_layers is not None:
        return f"{whose} is neither a hybrid nor a ResNet of Google's kind"
    if config.pool != "cls":
        return f"{whose} has no pooling {config.pool}, only the class token"
    if config.position != "learned_1d" or config.position_at != "stem":
        return f"{whose} has no position embedding {config.position} at {config.position_at}"
    if config.layer_scale is not None:
        return f"{whose} has no layer scale"
    if config.later_blocks:
        return f"{whose} has no {config.later_blocks}"
    return None


GOOGLE_MEAN = GOOGLE_STD = (0.5, 0.5, 0.5)  # pixels / 127.5 - 1: vision_transformer, big_vision, timm's augreg
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's and most of timm's


# Data sets on which Google trains with the sigmoid loss (big_vision, configs/vit_i21k.py, bit_i21k.py and
# proj/scaling_laws/train_vit_g.py; Scaling Vision Transformers, section 3). ImageNet-21k is TFDS's.
_SIGMOID_CLASSES = {21843: "ImageNet-21k", 18291: "JFT-300M", 29593: "JFT-3B"}


@dataclass(frozen=True)
class UserHints:
    """The user's statements about a file without our record; None: infer it."""

    depth: int | None = None  # fewer blocks than the variant, on purpose
    position: Literal["sincos_2d", "none"] | None = None  # if it has no position embeddings
    loss: LossKind | None = None  # the head's


NO_HINTS = UserHints()


@dataclass(frozen=True)
class ExternalModel:
    """A converted model; uncommented fields are as in `SavedModelMeta`."""

    format: str  # for messages: "Google's npz (vision_transformer)", "torchvision state dict"
    state: dict[str, Tensor]  # under our (timm's) names, float32 on the CPU unless the file's dtype differs
    config: ModelConfig  # from the file, else the format's usual (see `notes`)
    image_size: int
    num_classes: int  # 0: no head, see `headless`
    head: HeadKind
    class_names: tuple[str, ...] = ()  # () if the file has none
    mean: tuple[float, ...] = GOOGLE_MEAN  # per channel, see `with_every_channel`
    std: tuple[float, ...] = GOOGLE_STD
    loss: LossKind | None = None  # None: unknown
    eval_protocol: str = "vit"
    eval_crop_share: float | None = None
    headless: str = "has no head"  # reason, for messages
    notes: tuple[str, ...] = field(default=())  # assumptions and changes, a sentence each, for the user

    def with_every_channel(self) -> ExternalModel:
        """Give each channel a mean and a deviation; files of other projects tell those of three colours."""
        channels = self.config.channels
        if channels == COLOUR_CHANNELS or len(self.mean) == len(self.std) == channels:
            return self
        mean, std = ((values[0] if len({*values}) == 1 else 0.5,) * channels for values in (self.mean, self.std))
        note = f"the file tells no mean and deviation of its {channels} channels: taken as {mean[0]:g} and {std[0]:g}"
        return replace(self, mean=mean, std=std, notes=(*self.notes, note))

    def with_loss(self, asked: LossKind | None) -> ExternalModel:
        """Settle the loss: the user's, the file's, or the usual one for this number of classes (with a note)."""
        if asked is not None or self.loss is not None or self.num_classes == 0:
            return replace(self, loss=asked or self.loss)
        data = _SIGMOID_CLASSES.get(self.num_classes)
        loss: LossKind = "sigmoid" if data else "softmax"
        why = f"as Google's on {data}, which have {self.num_classes:,} classes" if data else "as is usual"
        note = f"The file does not tell the loss of its head: taken as {loss}, {why}; --loss says otherwise."
        return replace(self, loss=loss, notes=(*self.notes, note))


def of_record(meta: SavedModelMeta, state: dict[str, Tensor], *, format: str) -> ExternalModel:
    """Make a model from our record; of a self-supervised stage only the trunk, with a masked autoencoder's first
    learned positions."""
    from shardvit.model.positions.embedding import starting_numbers, without_numbers

    names = ("image_size", "num_classes", "class_names", "mean", "std", "loss", "eval_protocol", "eval_crop_share")
    state = without_numbers(state, config=meta.model, image_size=meta.image_size)
    described = ExternalModel(
        format=format,
        state=state,
        config=meta.model,
        head="mlp" if meta.head == "mlp" else "linear",
        **{name: getattr(meta, name) for name in names},
    )
    if meta.has_classes:
        return described
    own = ("mask_token", "head.", "decoder.")
    trunk = {name: value for name, value in state.items() if not name.startswith(own)}
    if meta.head == "masked_autoencoder":
        trunk |= starting_numbers(meta.model, image_size=meta.image_size)
    left = "the mask token and the head for patches" if meta.head == "masked_patch" else "the decoder"
    note = f"it is of the {meta.head.replace('_', '-')} stage: {left} {'were' if left[-1] == 's' else 'was'} left out"
    return replace(described, state=trunk, num_classes=0, class_names=(), notes=(note,))


def of_shapes(
    state: dict[str, Tensor], *, format: str, semantics: Semantics, given: ModelConfig | None, origin: str
) -> ExternalModel:
    """Make a model from tensors' shapes, as `config_of`; ValueError if they give no sizes or contradict `given`."""
    sizes = read_sizes(shapes_of(state), origin=origin, grid_size=semantics.grid_size)
    if sizes.grid_size is None and semantics.image_size is None:
        raise ValueError(
            f"{origin} has no position embeddings ({format}), so its resolution and kind of positions are unknown: it "
            "is incomplete, or import the folder that shardvit saved, or the file with its record FILE.json beside it"
        )
    config, notes = config_of(sizes, semantics=semantics, given=given, origin=origin)
    if config.class_token_position != sizes.class_token_position:
        state = move_class_row(state, config=config)
    return ExternalModel(
        format=format,
        state=state,
        config=config,
        image_size=semantics.image_size or (sizes.grid_size or 0) * config.sizes.patch_size,
        num_classes=sizes.num_classes,
        head=sizes.head,
        notes=notes,
    )


# CaiT's value for small models (arXiv 2103.17239, table of hyper-parameters) and timm's; used for fresh models only.
_LAYER_SCALE = 1e-5


@dataclass(frozen=True)
class Semantics:
    """Properties that shapes do not show; None if neither file nor format gives them."""

    gelu: Gelu
    layer_norm_eps: float
    interpolation: Interpolation
    heads: int | None = None
    layer_scale: float | None = None
    position: PositionKind | None = None
    class_token_position: ClassTokenPosition | None = None  # None: from the shapes
    image_size: int | None = None  # without learned positions, which tell it
    grid_size: int | None = None  # of learned positions
    told: Mapping[str, Any] = field(default_factory=dict)  # other fields of `ModelConfig`; they win over shapes


def lost_blocks(sizes: VitSizes) -> str | None:
    """Say that blocks are probably missing, if a named trunk has fewer than its variant; else None."""
    for name, variant in VARIANTS.items():
        same = (variant.width, variant.heads, variant.mlp_dim) == (sizes.width, sizes.heads, sizes.mlp_dim)
        if same and sizes.depth < variant.depth:
            return (
                f"has {sizes.depth} blocks where {name} has {variant.depth}: the last ones are missing; if its model "
                f"is really so shallow, give --depth {sizes.depth}"
            )
    return None


def config_of(
    sizes: StateSizes, *, semantics: Semantics, given: ModelConfig | None, origin: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The trunk of a file, and notes on what was assumed or overridden. `given` is the user's configuration (see
    `settle`); `origin` begins messages. ValueError if the number of heads is unknown or contradicts the file."""
    pool_and_scale: dict[str, Any] = {"pool": sizes.pool, **sizes.later, **semantics.told}
    if sizes.channels != COLOUR_CHANNELS:
        pool_and_scale["channels"] = sizes.channels
    if (semantics.class_token_position or sizes.class_token_position) == "none":
        pool_and_scale["class_token_position"] = "none"
    if sizes.layer_scale:
        pool_and_scale["layer_scale"] = semantics.layer_scale or _LAYER_SCALE
    of_file: dict[str, Any] = (
        ({"gelu": semantics.gelu} if "mlp" not in pool_and_scale else {})
        | {
            "layer_norm_eps": semantics.layer_norm_eps,
            "interpolation": semantics.interpolation,
        }
        | ({"position": semantics.position} if semantics.position else {})
    )
    if given is None:
        variant = variant_of(sizes, heads=semantics.heads)
        if variant is not None:
            return _checked({"variant": variant} | pool_and_scale | of_file, origin=origin), ()
        heads, notes = _heads(sizes, semantics=semantics, origin=origin)
        stem = ("resnet_layers", "resnet_width_factor") if sizes.trunk.resnet_layers is not None else ()
        own = {name: getattr(sizes.trunk, name) for name in ("width", "depth", "mlp_dim", "patch_size", *stem)}
        return _checked(own | {"heads": heads} | pool_and_scale | of_file, origin=origin), notes
    return settle(given, of_file=pool_and_scale | of_file, heads=semantics.heads, kind="vit", origin=origin)


def settle(
    given: ModelConfig, *, of_file: Mapping[str, Any], heads: int | None, kind: Literal["vit", "resnet"], origin: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Complete the user's configuration from the file, with a note for each overridden value. Sizes and explicit values
    in `given` win (`adapt` compares them with the weights); `of_file` are other fields of `ModelConfig`. ValueError if
    the file holds another kind of model or number of heads."""
    if given.kind != kind:
        what = {"vit": "a Vision Transformer", "resnet": "a pure ResNet"}
        raise ValueError(f"{origin} holds {what[kind]}, not {what[given.kind]} as was asked for")
    if heads and given.kind == "vit" and given.sizes.heads != heads:
        raise ValueError(
            f"{origin} has {heads} attention heads, the model asked for has {given.sizes.heads}: give --heads or "
            "--variant as in the file"
        )
    explicit = given.model_dump(exclude_unset=True)
    notes = tuple(
        f"{name} is {explicit[name]} as given, not the {value} of the file or its format"
        for name, value in of_file.items()
        if name in explicit and explicit[name] != value
    )
    return _checked(dict(of_file) | explicit, origin=origin), notes


def _checked(fields: dict[str, Any], *, origin: str) -> ModelConfig:
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        raise ValueError(f"{origin} describes no possible model: {first_mistake(error)}") from None


def _heads(sizes: StateSizes, *, semantics: Semantics, origin: str) -> tuple[int, tuple[str, ...]]:
    if semantics.heads:
        return semantics.heads, ()
    for name, variant in VARIANTS.items():
        if variant.width == sizes.trunk.width:
            return variant.heads, (f"{variant.heads} attention heads are assumed, as {name} has at this width",)
    raise ValueError(
        f"{origin} does not tell the number of attention heads (q, k and v of width {sizes.trunk.width} are one "
        f"matrix): give --heads, with {sizes.in_words()}"
    )


def adapt(
    external: ExternalModel,
    *,
    image_size: int | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    loss: LossKind | None = None,
) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """Return record and weights of `external`, for another resolution or number of classes.

    A new `num_classes` replaces the head by a zero linear one, trained with `loss` (None: softmax). `class_names`
    default to the file's, else "0", "1", ..., and may replace `num_classes`. ValueError if the weights do not fit (with
    a table) or are not finite, there is neither head nor class count, or an argument does not fit.
    """
    import torch

    if class_names is not None:
        if num_classes is not None and num_classes != len(class_names):
            raise ValueError(f"{len(class_names)} class names for --num-classes {num_classes}: give as many")
        num_classes = len(class_names)
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"--num-classes must be at least 1, not {num_classes}")
    wanted = num_classes if num_classes is not None else external.num_classes
    if wanted == 0:
        raise ValueError(f"the {external.format} {external.headless}: give --num-classes to attach a zero one")

    state = dict(external.state)
    new_head = wanted != external.num_classes
    if new_head:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        like = next(tensor for tensor in state.values() if tensor.is_floating_point())
        for head in ("head", "head.dist") if external.config.distillation_token == "learned" else ("head",):
            state[f"{head}.weight"] = torch.zeros(wanted, external.config.num_features, dtype=like.dtype)
            state[f"{head}.bias"] = torch.zeros(wanted, dtype=like.dtype)
    described = _record(external, num_classes=wanted, head="linear" if new_head else external.head)
    check_state(state, meta=described, says=f"{external.format}: does not fit the model that it was taken for")
    broken = next((name for name, tensor in state.items() if not tensor.isfinite().all()), None)
    if broken:
        raise ValueError(f"the {external.format} has NaN or infinity in {broken}: it is damaged, get it again")
    if class_names is None:
        class_names = external.class_names if external.class_names and not new_head else list(map(str, range(wanted)))
    changes: dict[str, Any] = {"class_names": tuple(class_names)}
    if new_head:
        changes["loss"] = loss or "softmax"
    if image_size is not None and image_size != external.image_size:
        from shardvit.model.positions.interpolation import resize_state

        sizes = {"from_image_size": external.image_size, "to_image_size": image_size}
        state = resize_state(state, config=external.config, **sizes)
        changes["image_size"] = image_size
    return SavedModelMeta.model_validate(described.model_dump() | changes), state


def _record(external: ExternalModel, *, num_classes: int, head: str) -> SavedModelMeta:
    names = ("image_size", "mean", "std", "eval_protocol", "eval_crop_share")
    try:
        return SavedModelMeta.model_validate(
            {name: getattr(external, name) for name in names}
            | {"loss": external.loss or "softmax", "model": external.config, "num_classes": num_classes, "head": head}
            | {"class_names": tuple(map(str, range(num_classes)))}
        )
    except ValidationError as error:
        raise ValueError(f"the {external.format} says what cannot be: {first_mistake(error)}") from None
