"""What the shapes of a state dict under our names tell of its model, and what they leave open.

Costs nothing and imports no torch. Shapes tell neither the number of heads (q, k and v are one matrix), nor the form
of GELU, nor epsilon, nor the kernel of interpolation: `Semantics` brings these from the file's format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from model.config import Gelu, Interpolation, ModelConfig, Pool, VitSizes, resnet_stride
from model.variants import HYBRIDS, VARIANTS

if TYPE_CHECKING:
    from model.head import HeadKind

Shape = tuple[int, ...]

# CaiT's value for its smaller models (arXiv 2103.17239, table of hyper-parameters) and timm's usual; it matters to a
# fresh model only.
_LAYER_SCALE = 1e-5


@dataclass(frozen=True)
class StateSizes:
    """A Transformer's sizes as its tensors have them; `grid_size` is None without `pos_embed`, `num_classes` 0 without
    a head, `resnet_layers` None without a ResNet stem."""

    width: int
    depth: int
    mlp_dim: int
    patch_size: int
    resnet_layers: tuple[int, ...] | None
    pool: Pool
    layer_scale: bool
    grid_size: int | None
    num_classes: int
    head: HeadKind

    @property
    def trunk(self) -> tuple[object, ...]:
        """What a variant fixes, heads aside."""
        return self.width, self.depth, self.mlp_dim, self.patch_size, self.resnet_layers

    def in_words(self) -> str:
        """The sizes that make the trunk, as a user would give them."""
        stem = f" (and resnet_layers {list(self.resnet_layers)})" if self.resnet_layers is not None else ""
        return (
            f"--width {self.width} --depth {self.depth} --mlp-dim {self.mlp_dim} --patch-size {self.patch_size}{stem}"
        )


@dataclass(frozen=True)
class Semantics:
    """What no shape tells: `heads` and `layer_scale` are None where neither file nor format does either."""

    gelu: Gelu
    layer_norm_eps: float
    interpolation: Interpolation
    heads: int | None = None
    layer_scale: float | None = None


def read_sizes(shapes: Mapping[str, Shape], *, origin: str) -> StateSizes:
    """The sizes of the Vision Transformer whose tensors, under our names, have these shapes.

    Raises:
        ValueError: the tensors that tell the sizes are missing, the patches are not square, or the positions are not
            those of a square grid; the message begins with `origin`.
    """
    needed = ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "norm.weight")
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise ValueError(
            f"{origin} has no tensor for our {', '.join(missing)}: it is incomplete, or no Vision Transformer"
        )
    patch = shapes["patch_embed.proj.weight"]
    if len(patch) != 4 or patch[2] != patch[3]:
        raise ValueError(f"{origin} has a patch embedding of shape {patch}: only square patches can be read")
    resnet_layers = _resnet_layers(shapes)
    head = shapes.get("head.logits.weight") or shapes.get("head.weight")
    return StateSizes(
        width=patch[0],
        depth=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        mlp_dim=shapes["blocks.0.mlp.fc1.weight"][0],
        patch_size=patch[2] * (1 if resnet_layers is None else resnet_stride(resnet_layers)),
        resnet_layers=resnet_layers,
        pool="cls" if "cls_token" in shapes else "map" if "attn_pool.latent" in shapes else "gap",
        layer_scale="blocks.0.ls1.gamma" in shapes,
        grid_size=_grid_size(shapes, origin=origin),
        num_classes=head[0] if head else 0,
        head="mlp" if "head.logits.weight" in shapes else "linear",
    )


def variant_of(sizes: StateSizes, *, heads: int | None = None) -> str | None:
    """The named variant with these sizes, if there is one; heads must be its too where they are known."""
    named = {f"{name}/{sizes.patch_size}": variant for name, variant in VARIANTS.items()} | HYBRIDS
    for name, variant in named.items():
        patch_size = variant.patch_size or sizes.patch_size
        trunk = (variant.width, variant.depth, variant.mlp_dim, patch_size, variant.resnet_layers)
        if trunk == sizes.trunk and heads in (None, variant.heads):
            return name
    return None


def lost_blocks(sizes: VitSizes) -> str | None:
    """What is said of weights whose last blocks are probably missing: a named trunk's sizes, and fewer blocks."""
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
    """The trunk of a file, and notes for the user: what was assumed, what the user's word replaced.

    Args:
        sizes: of the file.
        semantics: what the file or its format says besides.
        given: the user's configuration. Its sizes are taken as they are (`surgery` compares them with the file); what
            was not set explicitly follows the file; an explicit gelu, epsilon or interpolation wins.
        origin: begins every message.

    Raises:
        ValueError: the number of heads is not known, or the user's is not the file's.
    """
    pool_and_scale: dict[str, Any] = {"pool": sizes.pool}
    if sizes.layer_scale:
        pool_and_scale["layer_scale"] = semantics.layer_scale or _LAYER_SCALE
    told = {
        "gelu": semantics.gelu,
        "layer_norm_eps": semantics.layer_norm_eps,
        "interpolation": semantics.interpolation,
    }
    if given is None:
        variant = variant_of(sizes, heads=semantics.heads)
        if variant is not None:
            return _checked({"variant": variant} | pool_and_scale | told, origin=origin), ()
        heads, notes = _heads(sizes, semantics=semantics, origin=origin)
        more: dict[str, Any] = {} if sizes.resnet_layers is None else {"resnet_layers": sizes.resnet_layers}
        own = {name: getattr(sizes, name) for name in ("width", "depth", "mlp_dim", "patch_size")}
        return _checked(own | {"heads": heads} | more | pool_and_scale | told, origin=origin), notes
    return settle(given, told=pool_and_scale | told, heads=semantics.heads, kind="vit", origin=origin)


def settle(
    given: ModelConfig, *, told: Mapping[str, Any], heads: int | None, kind: Literal["vit", "resnet"], origin: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The user's configuration, completed by what a file tells.

    Args:
        given: its sizes stand (`surgery` compares them with the weights), and so does what was set explicitly.
        told: fields of `ModelConfig`, the sizes aside, as the file or its format has them.
        heads: those of the file, where it tells.
        kind: of the file's model.
        origin: begins every message.

    Returns the trunk, and a note for each word of the file that the user's replaced.

    Raises:
        ValueError: the file holds a model of another kind, or with another number of heads.
    """
    if given.kind != kind:
        what = {"vit": "a Vision Transformer", "resnet": "a pure ResNet"}
        raise ValueError(f"{origin} holds {what[kind]}, not {what[given.kind]} as was asked for")
    if heads and given.kind == "vit" and given.sizes.heads != heads:
        raise ValueError(
            f"{origin} has {heads} attention heads, the model asked for has {given.sizes.heads}: give --heads or "
            "--variant as in the file"
        )
    said = given.model_dump(exclude_unset=True)
    notes = tuple(
        f"{name} is {said[name]} as given, not the {value} of the file or its format"
        for name, value in told.items()
        if name in said and said[name] != value
    )
    return _checked(dict(told) | said, origin=origin), notes


def _checked(fields: dict[str, Any], *, origin: str) -> ModelConfig:
    """The configuration; what contradicts itself is said in one sentence."""
    try:
        return ModelConfig(**fields)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{origin} is described in a way that no model is: {reason}") from None


def _heads(sizes: StateSizes, *, semantics: Semantics, origin: str) -> tuple[int, tuple[str, ...]]:
    """The number of heads of a trunk without a name: what the file says, else that of the named width."""
    if semantics.heads:
        return semantics.heads, ()
    for name, variant in VARIANTS.items():
        if variant.width == sizes.width:
            return variant.heads, (f"{variant.heads} attention heads are assumed, as {name} has at this width",)
    raise ValueError(
        f"{origin} does not tell the number of attention heads (q, k and v of width {sizes.width} are one matrix): "
        f"give --heads, with {sizes.in_words()}"
    )


def _grid_size(shapes: Mapping[str, Shape], *, origin: str) -> int | None:
    """Patches along one side, from the learned 1-D position embeddings."""
    if "pos_embed" not in shapes:
        return None
    shape = shapes["pos_embed"]
    num_patches = shape[1] - ("cls_token" in shapes) if len(shape) == 3 else 0
    grid_size = math.isqrt(max(0, num_patches))
    if grid_size == 0 or grid_size**2 != num_patches:
        raise ValueError(
            f"{origin} has position embeddings of shape {shape}: {num_patches} patches are no square grid, and only "
            "models of square images can be read"
        )
    return grid_size


def _resnet_layers(shapes: Mapping[str, Shape]) -> tuple[int, ...] | None:
    """Units in each stage of a hybrid's stem; None without one."""
    if not any(name.startswith("patch_embed.backbone.") for name in shapes):
        return None
    prefix = "patch_embed.backbone.stages."
    units: dict[int, int] = {}
    for name in shapes:
        if name.startswith(prefix):
            stage, _, unit, *_ = name.removeprefix(prefix).split(".")
            units[int(stage)] = max(units.get(int(stage), 0), 1 + int(unit))
    return tuple(units[stage] for stage in sorted(units))
