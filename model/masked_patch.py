"""Masked patch prediction, the paper's self-supervised task (ViT, appendix B.1.2): the model and its targets.

Half of an image's patch embeddings are corrupted: most replaced by a learned `mask_token`, some by another patch's,
some kept; the caller draws which. As in BERT this comes before positions are added, so a masked patch knows where it
is. From its final, normed token a linear layer predicts a corrupted patch's mean colour: 3 bits a channel, 512 classes.
It starts at zero, so the loss begins at exactly ln 512. A hybrid's stem sees beyond its patch: an easier task.

A trunk with attention pooling (`pool: map`) is built without it, so that weights which no gradient reaches are neither
decayed nor saved; `classifier_of` adds them. Draws no random numbers.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from model.config import NO_REGULARISATION, ModelConfig, Regularisation
from model.init import initialise
from model.vit import PositionedVit, build_model, encode
from model.vocabulary import COLOUR_LEVELS, COLOURS


class MaskedPatchVit(VisionTransformer):
    """A trunk with `mask_token` [1, 1, D], and a head of 512 outputs for single tokens."""

    mask_token: nn.Parameter

    def forward(self, images: Tensor, source: Tensor, corrupted: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Images [n, 3, S, S] -> logits [n, K, 512] of the patches `corrupted` [n, K], each named once.

        `source` [n, N] is, for each patch, the patch whose embedding it gets, or N for the mask token. Both int64.
        """
        x = self._pos_embed(corrupt(self.patch_embed(images), source=source, mask_token=self.mask_token))
        patches = encode(self, x)[:, self.num_prefix_tokens :]
        return self.head(patches.gather(1, corrupted[..., None].expand(-1, -1, patches.shape[-1])))


class MaskedPatchPositionedVit(MaskedPatchVit, PositionedVit):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The same with a position embedding of our own."""


def build_masked_patch(
    config: ModelConfig, *, image_size: int, regularisation: Regularisation = NO_REGULARISATION
) -> MaskedPatchVit:
    """Build the model for square RGB images, with placeholder weights; draws no random numbers.

    Its state is that of `build_model` with a linear head of 512 outputs (and no attention pooling), and "mask_token".
    Raises ValueError for a pure ResNet, fewer than two patches, patch dropout, and what `build_model` refuses.
    """
    if config.kind == "resnet" or config.grid_size(image_size) < 2:
        raise ValueError("masked patch prediction needs at least two patches: take another model, or more pixels")
    if regularisation.patch_dropout:
        raise ValueError("patch_dropout would drop the patches that masked patch prediction predicts: leave it out")
    trunk = build_model(
        config.model_copy(update={"pool": "gap"}) if config.pool == "map" else config,
        image_size=image_size,
        num_classes=len(COLOURS),
        head="linear",
        regularisation=regularisation,
    )
    # Another forward pass over the same modules; torch.nn.utils.parametrize changes classes in the same way.
    kind = MaskedPatchPositionedVit if isinstance(trunk, PositionedVit) else MaskedPatchVit
    trunk.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(trunk, MaskedPatchVit)
    trunk.mask_token = nn.Parameter(torch.zeros(1, 1, config.sizes.width))
    return trunk


def corrupt(embeddings: Tensor, *, source: Tensor, mask_token: Tensor) -> Tensor:
    """Patch embeddings [n, N, D] -> those that `source` [n, N] chooses among them and the mask's, number N.

    Multiplies by ones and zeros: an indexed read's gradient is summed in no fixed order, and a resume must be exact.
    """
    choices = torch.cat([embeddings, mask_token.expand(len(embeddings), -1, -1).to(embeddings.dtype)], dim=1)
    chosen = source[..., None] == torch.arange(choices.shape[1], device=source.device)
    return chosen.to(embeddings.dtype) @ choices


def colour_classes(pixels: Tensor, *, patch_size: int) -> Tensor:
    """Augmented pixels, uint8 [n, S, S, 3] -> the targets, each patch's 3-bit mean colour, int64 [n, N], row by row.

    Per channel the level is min(7, floor(8 m)), m the mean over the patch of pixels in [0, 1]; the class is 64 r + 8 g
    + b. Computed in integers, so alike on all devices.
    """
    count, size = pixels.shape[:2]
    grid = size // patch_size
    sums = pixels.reshape(count, grid, patch_size, grid, patch_size, 3).sum(dim=(2, 4), dtype=torch.int64)
    red, green, blue = (COLOUR_LEVELS * sums // (255 * patch_size**2)).clamp(max=COLOUR_LEVELS - 1).unbind(dim=-1)
    return (COLOUR_LEVELS**2 * red + COLOUR_LEVELS * green + blue).flatten(1)


def classifier_of(
    masked: MaskedPatchVit, *, config: ModelConfig, image_size: int, num_classes: int, seed: int
) -> nn.Module:
    """Copy the trunk of `masked`, in float32 and without mask token, below a zero linear layer for classes.

    Attention pooling starts at Google's initial values for `seed`. Raises ValueError if `num_classes` is not positive.
    """
    model = build_model(config, image_size=image_size, num_classes=num_classes, head="linear")
    initialise(model, seed=seed)
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("head.", "attn_pool."))}
    trunk = {name: it for name, it in masked.state_dict().items() if not name.startswith(("head.", "mask_token"))}
    model.load_state_dict(fresh | trunk)
    return model
