"""The named sizes of Vision Transformers, each with the paper that defines it.

Costs nothing: plain data, no heavy import. It does not know patch sizes (those are the number after the slash
of a name such as "B/16"), image sizes or numbers of classes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """The patch-free part of a named model.

    Attributes:
        width: the size D of a token.
        depth: the number of encoder blocks.
        heads: the number of attention heads of a block.
        mlp_dim: the hidden size of a block's MLP.
        source: the paper and table that give these four numbers.
    """

    width: int
    depth: int
    heads: int
    mlp_dim: int
    source: str


_VIT = "An Image is Worth 16x16 Words (arXiv 2010.11929), Table 1"
_AUGREG = "How to train your ViT? (arXiv 2106.10270), table of configurations; first in DeiT (arXiv 2012.12877)"
_SCALING = "Scaling Vision Transformers (arXiv 2106.04560), table of model architectures"

# The names are case-sensitive, as in the papers: g (giant, 1.0 billion) is not G (gigantic, 1.8 billion).
VARIANTS: dict[str, Variant] = {
    "Ti": Variant(192, 12, 3, 768, _AUGREG),
    "S": Variant(384, 12, 6, 1536, _AUGREG),
    "B": Variant(768, 12, 12, 3072, _VIT),
    "L": Variant(1024, 24, 16, 4096, _VIT),
    "H": Variant(1280, 32, 16, 5120, _VIT),
    "g": Variant(1408, 40, 16, 6144, _SCALING),
    "G": Variant(1664, 48, 16, 8192, _SCALING),
}


def parse_variant(name: str) -> tuple[Variant, int]:
    """Split a name such as "B/16" into its `Variant` and its patch size in pixels.

    Raises:
        ValueError: the name is not of the form NAME/PATCH, or NAME is unknown.
    """
    match = re.fullmatch(r"([A-Za-z]+)/([1-9][0-9]*)", name)
    if match is None:
        raise ValueError(f"variant {name!r} must be a name, a slash and a patch size in pixels, such as 'B/16'")
    letters, patch_size = match.groups()
    if letters not in VARIANTS:
        near = difflib.get_close_matches(letters.capitalize(), VARIANTS, n=1, cutoff=0.3)
        hint = f" (did you mean '{near[0]}/{patch_size}'?)" if near else ""
        raise ValueError(
            f"variant {name!r} is unknown{hint}; known names: {', '.join(VARIANTS)}, each with any patch size"
        )
    return VARIANTS[letters], int(patch_size)
