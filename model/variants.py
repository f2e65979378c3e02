"""The named models: Vision Transformers, hybrids and the ResNet baseline, each with the paper that defines it.

A pure Transformer takes any patch size (the 16 of "B/16"), a hybrid's stem only its own. To add a variant: a row in
`VARIANTS`, `HYBRIDS` or `RESNETS`.
"""

import difflib
import re
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class VitSizes:
    """All sizes of a Transformer, with or without a ResNet stem."""

    width: int  # D, of a token
    depth: int  # encoder blocks
    heads: int
    mlp_dim: int
    patch_size: int = 0  # in pixels, stem included; 0 in `VARIANTS`: any
    resnet_layers: tuple[int, ...] | None = None  # units per stage of a hybrid's stem; (): only the root; None: no stem
    resnet_width_factor: int = 1
    source: str = field(default="", compare=False)  # paper and table of a named variant

    @property
    def stem_patch_size(self) -> int:
        """Patch size on the patch embedding's input: pixels, or the stem's features."""
        return self.patch_size if self.resnet_layers is None else self.patch_size // resnet_stride(self.resnet_layers)


@dataclass(frozen=True)
class ResnetSizes:
    """All sizes of a pure ResNet (BiT): units per stage and the factor on all widths."""

    layers: tuple[int, ...]
    width_factor: int
    source: str = field(default="", compare=False)

    @property
    def num_features(self) -> int:
        """Channels of the last stage: four times its bottleneck's, which doubles from 64 with each stage."""
        return 64 * self.width_factor * 2 ** (len(self.layers) - 1) * 4


def resnet_stride(layers: tuple[int, ...]) -> int:
    """Pixels per feature along a side: 4 at the root, doubled by all stages but the first."""
    return 4 * 2 ** max(0, len(layers) - 1)


def gated_mlp_dim(mlp_dim: int) -> int:
    """Hidden size of a SwiGLU with as many weights as an MLP of `mlp_dim`: 2/3 of it, up to the next multiple of 8
    (facebookresearch/dinov2, dinov2/layers/swiglu_ffn.py)."""
    return (mlp_dim * 2 // 3 + 7) // 8 * 8


_VIT = "An Image is Worth 16x16 Words (arXiv 2010.11929), Table 1"
_AUGREG = "How to train your ViT? (arXiv 2106.10270), table of configurations; first in DeiT (arXiv 2012.12877)"
_SCALING = "Scaling Vision Transformers (arXiv 2106.04560), table of model architectures"
_HYBRID = "google-research/vision_transformer, vit_jax/configs/models.py; ViT paper, section 4.1"
_TABLE_6 = "ViT paper (arXiv 2010.11929), section 4.1 and Table 6"
_BIT = "Big Transfer (arXiv 1912.11370), the ResNets of the ViT paper's Tables 2 and 6"

# Case-sensitive, as in the papers: g (giant, 1.0 billion) is not G (gigantic, 1.8 billion).
VARIANTS: dict[str, VitSizes] = {
    "Ti": VitSizes(192, 12, 3, 768, source=_AUGREG),
    "S": VitSizes(384, 12, 6, 1536, source=_AUGREG),
    "B": VitSizes(768, 12, 12, 3072, source=_VIT),
    "L": VitSizes(1024, 24, 16, 4096, source=_VIT),
    "H": VitSizes(1280, 32, 16, 5120, source=_VIT),
    "g": VitSizes(1408, 40, 16, 6144, source=_SCALING),
    "G": VitSizes(1664, 48, 16, 8192, source=_SCALING),
}

# /16 drops R50's fourth stage and gives its three units to the third (ViT paper, section 4.1).
HYBRIDS: dict[str, VitSizes] = {
    "R50+B/16": replace(VARIANTS["B"], source=_HYBRID, patch_size=16, resnet_layers=(3, 4, 9)),
    "R50+B/32": replace(VARIANTS["B"], source=_TABLE_6, patch_size=32, resnet_layers=(3, 4, 6, 3)),
    "R50+L/16": replace(VARIANTS["L"], source=_TABLE_6, patch_size=16, resnet_layers=(3, 4, 9)),
    "R50+L/32": replace(VARIANTS["L"], source=_HYBRID, patch_size=32, resnet_layers=(3, 4, 6, 3)),
    # /16 by name; but root and max pool each halve, so 8x8 patches of their features are 32 pixels.
    "R+Ti/16": replace(VARIANTS["Ti"], source=_HYBRID, patch_size=32, resnet_layers=()),
    "R26+S/32": replace(VARIANTS["S"], source=_HYBRID, patch_size=32, resnet_layers=(2, 2, 2, 2)),
}

_RESNET_DEPTHS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}
_RESNETS = ("50x1", "50x2", "50x3", "101x1", "101x3", "152x1", "152x2", "152x4", "200x3")
RESNETS: dict[str, ResnetSizes] = {
    f"R{name}": ResnetSizes(_RESNET_DEPTHS[name.split("x")[0]], int(name.split("x")[1]), _BIT) for name in _RESNETS
}


def parse_variant(name: str) -> VitSizes | ResnetSizes:
    """Sizes of a name such as "B/16", "R50+B/16" or "R50x1"; ValueError if unknown."""
    own: dict[str, VitSizes | ResnetSizes] = {**HYBRIDS, **RESNETS}
    if name in own:
        return own[name]
    if name.startswith("R"):
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"variant {name!r} is unknown{hint}; known hybrids and ResNets: {', '.join(own)}")
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9]*)/([1-9][0-9]{0,3})", name)
    if match is None:
        form = "must be a name, a slash and a patch size in pixels, such as 'B/16', or one of"
        raise ValueError(f"variant {name!r} {form} {', '.join(own)}")
    letters, patch_size = match.groups()
    if letters not in VARIANTS:
        near = difflib.get_close_matches(letters.capitalize(), VARIANTS, n=1, cutoff=0.3)
        hint = f" (did you mean '{near[0]}/{patch_size}'?)" if near else ""
        known = ", ".join(VARIANTS)
        raise ValueError(f"variant {name!r} is unknown{hint}; known names: {known}, each with any patch size")
    return replace(VARIANTS[letters], patch_size=int(patch_size))
