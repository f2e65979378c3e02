"""Configuration of a model's trunk (a named variant or its sizes, and the paper's options) and its dropout.

Imports pydantic only, so recipes and `shardvit --help` need neither torch nor timm. Image size, classes, head and
dropout belong to a stage: they change between pre-training and fine-tuning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardvit.model.variants import ResnetSizes, VitSizes, gated_mlp_dim, parse_variant, resnet_stride
from shardvit.model.vocabulary import (
    COLOUR_CHANNELS,
    MOST_CHANNELS,
    ClassToken,
    ClassTokenPosition,
    DistillationToken,
    DropoutMasks,
    FinalNorm,
    Gelu,
    Interpolation,
    Mlp,
    Norm,
    Pool,
    PositionAt,
    PositionKind,
    QkNorm,
    Rope,
    StochasticDepthRule,
)

Width = Annotated[int, Field(gt=0, le=2**16)]
Depth = Annotated[int, Field(gt=0, le=1000)]
Hidden = Annotated[int, Field(gt=0, le=2**20)]
Pixels = Annotated[int, Field(gt=0, le=2**14)]
WidthFactor = Annotated[int, Field(gt=0, le=64)]

_MOST_WEIGHTS = 10**12
_SIZES = ("width", "depth", "heads", "mlp_dim", "patch_size", "resnet_layers", "resnet_width_factor")
LATER_BLOCKS = ("registers", "distillation_token", "class_token", "final_norm", "qk_norm", "mlp", "norm", "rope")
"""Fields of what came after the paper; written only where they are not the default, as older releases lack them."""
OF_TRANSFORMERS = (
    *("pool", "position", "position_at", "class_token_position"),
    *("layer_scale", "gelu", "layer_norm_eps", "interpolation"),
    *LATER_BLOCKS,
)
"""Fields other than sizes that a pure ResNet lacks."""


class ModelConfig(BaseModel):
    """A trunk: `variant` or the sizes. Fields hold what the user wrote; read numbers from `sizes` or `resnet`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # A name of `model.variants`: "B/16", "L/32", "H/14", "Ti/4" (any patch size in pixels); the hybrids "R50+B/16",
    # "R50+L/32", "R26+S/32", "R+Ti/16"; the pure ResNets "R50x1", "R152x4".
    variant: str | None = None
    # A model of one's own, ./mine.py:build (docs/own-code.md): all other keys are its function's
    custom: str | None = Field(default=None, pattern=r"\.py(@[0-9a-f]{64})?:[A-Za-z_]\w*$")
    options: dict[str, Any] = Field(default={}, exclude=True)
    width: Width | None = None  # size D of a token
    depth: Depth | None = None  # encoder blocks
    heads: Width | None = None  # attention heads; must divide `width`
    # Hidden size of the blocks' MLPs; default: 4 * width (ViT paper, Table 1), for SwiGLU 2/3 of that (see `sizes`)
    mlp_dim: Hidden | None = None
    patch_size: Pixels | None = None  # side in pixels, ResNet stem included
    # Units in each stage of a ResNet: a hybrid's stem ([]: only its root) or, without `width`, the whole model.
    resnet_layers: tuple[Depth, ...] | None = Field(default=None, max_length=4)
    resnet_width_factor: WidthFactor | None = None  # multiplies the ResNet's widths
    # Input of the head: class token, mean of the normed patch tokens, or attention pooling
    pool: Pool = "cls"
    position: PositionKind = "learned_1d"  # as in the ViT paper's Table 8; sincos_2d: big_vision's fixed one
    position_at: PositionAt = "stem"  # where a learned one is added: once, or before each block (shared, or one each)
    # learned: class and register tokens have a position too (the paper, vision_transformer); none: only patches have
    # one (big_vision; timm's no_embed_class), and Adam moves one parameter instead of a sum of two
    class_token_position: ClassTokenPosition = "learned"
    layer_scale: float | None = Field(default=None, gt=0)  # initial factor on each branch (CaiT, arXiv 2103.17239)
    gelu: Gelu = "tanh"  # flax's and Google's default; torch, timm and transformers use erf
    layer_norm_eps: float = Field(default=1e-6, gt=0)  # flax's default; transformers' is 1e-12
    interpolation: Interpolation = "google"  # google: bilinear, corners aligned; timm: bicubic, antialiased
    registers: int = Field(default=0, ge=0, le=256)  # learned tokens that the head does not read (arXiv 2309.16588)
    # learned: a token behind the class token with a head of its own; the answer is the mean of both (DeiT, 2012.12877)
    distillation_token: DistillationToken = "none"
    # pooled: only if the head reads it (pool cls); kept: beside gap or map too (MAE's and EVA-02's fine-tuning, DINOv3)
    class_token: ClassToken = "pooled"
    # With pool gap. tokens: the mean of normed tokens (big_vision); pooled: the norm of the mean (MAE; timm's fc_norm)
    final_norm: FinalNorm = "tokens"
    qk_norm: QkNorm = "none"  # per_head: norm each head's queries and keys (ViT-22B, arXiv 2302.05442)
    # swiglu: SiLU(gate) * value, fused as in DINOv2's giant (arXiv 2002.05202); swiglu_norm: normed before the last
    # layer, as in EVA-02's B and L (arXiv 2303.11331)
    mlp: Mlp = "gelu"
    norm: Norm = "layer"  # rms: no mean, no bias (arXiv 1910.07467); its epsilon is layer_norm_eps
    # Rotates queries and keys of patches by their place, beside `position` (none: rotation alone); see
    # `model.positions.rotary`. axial and mixed: RoPE-ViT (arXiv 2403.13298); eva: EVA-02; dinov3 (arXiv 2508.10104)
    rope: Rope = "none"
    # Channels of an image. Other than 3, files are read as they are (TIFF, 16-bit PNG, npy: docs/corpus.md)
    channels: int = Field(default=COLOUR_CHANNELS, ge=1, le=MOST_CHANNELS)

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or tree.get("custom") is None:
            return tree
        options = {key: each for key, each in tree.items() if key != "custom"}
        channels = {"channels": options["in_chans"]} if isinstance(options.get("in_chans"), int) else {}  # as in timm
        return {"custom": tree["custom"], "options": options, **channels}

    @model_serializer(mode="wrap")
    def _with_own_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        if self.custom is not None:
            return {"custom": self.custom, **self.options}
        usual = {"custom": None} | {name: type(self).model_fields[name].default for name in LATER_BLOCKS}
        usual["channels"] = COLOUR_CHANNELS
        return {key: each for key, each in handler(self).items() if key not in usual or each != usual[key]}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.custom is not None:
            return
        if self.options:
            yield "options has no effect: leave it out"
        given = [name for name in _SIZES if getattr(self, name) is not None]
        if self.variant is not None:
            if given:
                fixed = ", ".join(given)
                yield f"variant {self.variant!r} already fixes {fixed}: give either variant or the sizes, not both"
            parse_variant(self.variant)
        elif not given:
            yield "give a variant (such as 'B/16'), or width, depth, heads and patch_size"
        else:
            missing = [name for name in ("width", "depth", "heads", "patch_size") if name not in given]
            if missing and set(given) - {"resnet_layers", "resnet_width_factor"}:
                yield f"without a variant, {', '.join(missing)} must be given too"
        if self.resnet_width_factor is not None and self.resnet_layers is None:
            yield "resnet_width_factor has no effect without resnet_layers: leave it out, or give both"
        if self.kind == "resnet":
            ignored = [name for name in OF_TRANSFORMERS if getattr(self, name) != type(self).model_fields[name].default]
            if ignored:
                yield f"{', '.join(ignored)}: a pure ResNet has nothing of the kind; leave it out"
            if not self.resnet.layers:
                yield "resnet_layers: a pure ResNet has at least one stage, such as [3, 4, 6, 3]"
        else:
            yield from self._transformer_problems()

    def _transformer_problems(self) -> Iterator[str]:
        sizes, learned = self.sizes, self.position in ("learned_1d", "learned_2d")
        weights = sizes.depth * sizes.width * (4 * sizes.width + 2 * sizes.mlp_dim)
        if weights > _MOST_WEIGHTS:
            yield (
                f"width {sizes.width}, depth {sizes.depth} and mlp_dim {sizes.mlp_dim} make {weights:.1e} weights: "
                f"take a model of {_MOST_WEIGHTS:.0e} at most"
            )
        if sizes.width % sizes.heads:
            yield f"heads {sizes.heads} must divide width {sizes.width}"
        if sizes.resnet_layers is not None and sizes.patch_size % (stride := resnet_stride(sizes.resnet_layers)):
            yield (
                f"patch_size {sizes.patch_size} is no multiple of the {stride} pixels that a ResNet stem of "
                f"{len(sizes.resnet_layers)} stages takes together"
            )
        if self.position_at != "stem" and not learned:
            yield (
                f"position_at {self.position_at} is for position learned_1d and learned_2d (ViT paper, Table 8), "
                f"not for {self.position}: leave it out"
            )
        if self.class_token_position == "none" and not self.prefix_tokens:
            yield f"class_token_position has no effect with pool {self.pool}, which has no class token: leave it out"
        if self.class_token_position == "none" and not learned:
            yield (
                f"class_token_position has no effect with position {self.position}, which adds nothing to the class "
                "token anyway: leave it out"
            )
        if self.position == "sincos_2d" and sizes.width % 4:
            yield f"position sincos_2d needs a width that 4 divides, not {sizes.width}"
        if self.position == "learned_2d" and sizes.width % 2:
            yield f"position learned_2d needs an even width, not {sizes.width}"
        yield from self._block_problems()

    def _block_problems(self) -> Iterator[str]:
        if self.class_token == "kept" and self.pool == "cls":
            yield "class_token kept has no effect with pool cls, which reads it anyway: leave it out"
        if self.distillation_token == "learned" and (self.pool != "cls" or self.registers or self.rope != "none"):
            yield "distillation_token is for pool cls, without registers and rope, as in DeiT: leave one out"
        if self.final_norm == "pooled" and self.pool != "gap":
            yield f"final_norm pooled is for pool gap, not {self.pool}: leave it out"
        if self.mlp != "gelu" and self.gelu != "tanh":
            yield f"gelu has no effect with mlp {self.mlp}, whose activation is SiLU: leave it out"
        if self.position == "relative" and (both := [n for n in ("qk_norm", "rope") if getattr(self, n) != "none"]):
            yield f"{both[0]} {getattr(self, both[0])} does not go with position relative: take another position"
        if self.rope != "none" and (size := self.sizes.width // self.sizes.heads) % 4:
            yield f"rope {self.rope} needs heads of a size that 4 divides, not {size}: give other heads"

    @property
    def kind(self) -> Literal["vit", "resnet"]:
        """Transformer (hybrids too), or one without tokens that we know: a pure ResNet or the user's own."""
        if self.custom is not None:
            return "resnet"
        if self.variant is not None:
            return "vit" if isinstance(parse_variant(self.variant), VitSizes) else "resnet"
        return "resnet" if self.width is None else "vit"

    @property
    def has_convolutions(self) -> bool:
        """Besides the patch embedding, which is a matrix product."""
        return self.kind == "resnet" or self.sizes.resnet_layers is not None

    @property
    def sizes(self) -> VitSizes:
        if self.variant is not None:
            sizes = parse_variant(self.variant)
            assert isinstance(sizes, VitSizes), f"{self.variant} has no tokens"
            return sizes if self.mlp == "gelu" else replace(sizes, mlp_dim=gated_mlp_dim(sizes.mlp_dim))
        assert self.width and self.depth and self.heads and self.patch_size  # held by the validator
        usual = 4 * self.width if self.mlp == "gelu" else gated_mlp_dim(4 * self.width)
        mlp_dim, factor = self.mlp_dim or usual, self.resnet_width_factor or 1
        return VitSizes(self.width, self.depth, self.heads, mlp_dim, self.patch_size, self.resnet_layers, factor)

    @property
    def resnet(self) -> ResnetSizes:
        if self.variant is not None:
            sizes = parse_variant(self.variant)
            assert isinstance(sizes, ResnetSizes), f"{self.variant} is no pure ResNet"
            return sizes
        assert self.resnet_layers is not None  # held by the validator
        return ResnetSizes(self.resnet_layers, self.resnet_width_factor or 1)

    @property
    def with_learned_positions(self) -> Self:
        """Replace fixed positions (sincos_2d, none) by learned ones."""
        fixed = self.kind == "vit" and self.position in ("sincos_2d", "none")
        return self.model_copy(update={"position": "learned_1d"}) if fixed else self

    @property
    def has_class_token(self) -> bool:
        return self.pool == "cls" or self.class_token == "kept"

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, then the registers or the distillation token."""
        return self.has_class_token + self.registers + (self.distillation_token == "learned")

    @property
    def prefix_rows(self) -> int:
        """Rows of a learned position embedding for the tokens before the patches: all of them, or 0."""
        return self.prefix_tokens if self.class_token_position == "learned" else 0

    @property
    def later_blocks(self) -> str:
        """What this model has that the paper's lack, such as "registers 4 and rope axial"; "" if nothing."""
        found = [f"{name} {getattr(self, name)}" for name in LATER_BLOCKS]
        usual = [f"{name} {type(self).model_fields[name].default}" for name in LATER_BLOCKS]
        return " and ".join(each for each in found if each not in usual)

    @property
    def num_features(self) -> int:
        return self.sizes.width if self.kind == "vit" else self.resnet.num_features

    @property
    def num_blocks(self) -> int:
        """Blocks of the Transformer plus units of its stem; or units of a ResNet; 0: an own model's are unknown."""
        if self.custom is not None:
            return 0
        if self.kind == "resnet":
            return sum(self.resnet.layers)
        return self.sizes.depth + sum(self.sizes.resnet_layers or ())

    def grid_size(self, image_size: int) -> int:
        """Patches (or a ResNet's last features) along one side; ValueError names the sizes that fit."""
        if self.custom is not None:
            return 1
        if self.kind == "vit":
            what, stride = "the patch size", self.sizes.patch_size
        else:
            what, stride = "the ResNet's stride", resnet_stride(self.resnet.layers)
        if image_size <= 0 or image_size % stride:
            below = max(1, image_size // stride) * stride
            raise ValueError(
                f"image size {image_size} is not a multiple of {what} {stride}: take {below} or {below + stride}"
            )
        return image_size // stride


class DecoderConfig(BaseModel):
    """A masked autoencoder's decoder: usual blocks, with MLPs of 4 * width (MAE, arXiv 2111.06377, Table 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Width = 512
    depth: Depth = 8
    heads: Width = 16

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} must divide width {self.width}")
        if self.width % 4:
            raise ValueError(f"width {self.width}: its fixed positions need a width that 4 divides")
        return self


def kept_patches(num_patches: int, *, mask_ratio: float) -> int:
    """Patches that a masked autoencoder's encoder sees, rounded down as in the original; at least one."""
    return max(1, int(num_patches * (1 - mask_ratio)))


@dataclass(frozen=True)
class Regularisation:
    """Dropout rates, each in [0, 1), and the source of the masks; off by default."""

    dropout: float = 0.0  # where `model.vit` says (ViT paper, Table 3: 0.1 for ImageNet pre-training, else 0)
    stochastic_depth: float = 0.0  # rate at the last block (arXiv 1603.09382)
    patch_dropout: float = 0.0  # share of patch tokens dropped in training (FLIP, arXiv 2212.00794)
    masks: DropoutMasks = "process"  # source: the process's generator; sample: given words (`model.layers.dropout`)
    depth_rule: StochasticDepthRule = "linear"  # from 0 at the first block; uniform: the rate of all (DeiT III)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError if a rate is out of range or does not apply to this model."""
        for name in ("dropout", "stochastic_depth", "patch_dropout"):
            rate = getattr(self, name)
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, not {rate}")
            if rate and config.kind == "resnet":
                what = "an own model: make it a key of its own" if config.custom else "a pure ResNet: leave it out"
                raise ValueError(f"{name} is not for {what}")
        if self.patch_dropout and config.kind == "vit" and config.rope != "none":
            raise ValueError(f"patch_dropout does not go with rope {config.rope}, whose rotations are for all patches")
        if self.patch_dropout and (config.position == "relative" or config.position_at != "stem"):
            raise ValueError(
                "patch_dropout needs positions that are added once, before the patches are left out: "
                f"not position {config.position} at {config.position_at}"
            )


NO_REGULARISATION = Regularisation()
