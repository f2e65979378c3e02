"""Masked patch prediction, the paper's self-supervised task (ViT, appendix B.1.2): the model and its targets.

Half of an image's patch embeddings are corrupted: most become a learned `mask_token`, some another patch's, some stay;
the caller draws which. As in BERT, positions are added afterwards, so a masked patch knows where it is. A linear layer
predicts each corrupted patch's mean colour from its final, normed token: 3 bits a channel, 512 classes. It starts at
zero, so the loss starts at exactly ln 512. A hybrid's stem sees beyond its patch: an easier task. With attention
pooling (`pool: map`) the trunk is built without it, so no unused weights are decayed or saved; `classifier_of` adds it.
With `final_norm: pooled` its norm is that of tokens here, and that of the mean in the classifier.
"""

import torch
from torch import Tensor, nn

from shardvit.model.config import NO_REGULARISATION, ModelConfig, Regularisation
from shardvit.model.init import initialise
from shardvit.model.layers.chosen_tokens import chosen_tokens
from shardvit.model.vit import PositionedVit, Vit, build_model, encode
from shardvit.model.vocabulary import COLOUR_LEVELS, COLOURS


class MaskedPatchVit(Vit):
    """A trunk with `mask_token` [1, 1, D] and a head of 512 outputs per token."""

    mask_token: nn.Parameter

    def forward(self, images: Tensor, source: Tensor, corrupted: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Images [n, 3, S, S] -> logits [n, K, 512] of the patches `corrupted` [n, K], int64, no patch twice. `source`
        [n, N], int64, names the patch whose embedding each patch gets, or N for the mask token."""
        x = self._pos_embed(corrupt(self.patch_embed(images), source=source, mask_token=self.mask_token))
        patches = encode(self, x)[:, self.num_prefix_tokens :]
        return self.head(chosen_tokens(patches, corrupted))


class MaskedPatchPositionedVit(MaskedPatchVit, PositionedVit):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The same with a position embedding of our own."""


def build_masked_patch(
    config: ModelConfig, *, image_size: int, regularisation: Regularisation = NO_REGULARISATION
) -> MaskedPatchVit:
    """Build the model with placeholder weights: the state of `build_model` with a linear head of 512 outputs, and
    "mask_token". ValueError as in `build_model`, and for a pure ResNet, fewer than two patches, or patch dropout."""
    if config.kind == "resnet" or config.grid_size(image_size) < 2:
        raise ValueError("masked patch prediction needs at least two patches: take another model, or more pixels")
    if regularisation.patch_dropout:
        raise ValueError("patch_dropout would drop the patches that masked patch prediction predicts: leave it out")
    usual = {"final_norm": "tokens"} | ({"pool": "gap"} if config.pool == "map" else {})
    trunk = build_model(
        config.model_copy(update=usual),
        image_size=image_size,
        num_classes=len(COLOURS),
        head="linear",
        regularisation=regularisation,
    )
    # Another forward pass over the same modules; torch.nn.utils.parametrize also swaps classes.
    kind = MaskedPatchPositionedVit if isinstance(trunk, PositionedVit) else MaskedPatchVit
    trunk.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(trunk, MaskedPatchVit)
    trunk.mask_token = nn.Parameter(torch.zeros(1, 1, config.sizes.width))
    return trunk


def corrupt(embeddings: Tensor, *, source: Tensor, mask_token: Tensor) -> Tensor:
    """Replace patch embeddings [n, N, D] by those that `source` [n, N] names; N is the mask token. Multiplies by ones
    and zeros, since an indexed read's gradient is summed in no fixed order and a resume must be exact."""
    choices = torch.cat([embeddings, mask_token.expand(len(embeddings), -1, -1).to(embeddings.dtype)], dim=1)
    chosen = source[..., None] == torch.arange(choices.shape[1], device=source.device)
    return chosen.to(embeddings.dtype) @ choices


def colour_classes(pixels: Tensor, *, patch_size: int) -> Tensor:
    """Augmented pixels, uint8 [n, S, S, 3] -> each patch's 3-bit mean colour, int64 [n, N], row by row: 64 r + 8 g + b
    of levels min(7, floor(8 m)), m the patch's mean in [0, 1]. Integer arithmetic, so equal on all devices."""
    count, size = pixels.shape[:2]
    grid = size // patch_size
    sums = pixels.reshape(count, grid, patch_size, grid, patch_size, 3).sum(dim=(2, 4), dtype=torch.int64)
    red, green, blue = (COLOUR_LEVELS * sums // (255 * patch_size**2)).clamp(max=COLOUR_LEVELS - 1).unbind(dim=-1)
    return (COLOUR_LEVELS**2 * red + COLOUR_LEVELS * green + blue).flatten(1)


def classifier_of(
    masked: MaskedPatchVit, *, config: ModelConfig, image_size: int, num_classes: int, seed: int
) -> nn.Module:
    """Copy the trunk of `masked`, in float32 without mask token, and add a zero linear layer for classes. Attention
    pooling gets Google's initial values for `seed`. ValueError if `num_classes` is not positive."""
    model = build_model(config, image_size=image_size, num_classes=num_classes, head="linear")
    initialise(model, seed=seed)
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("head.", "attn_pool."))}
    trunk = {name: it for name, it in masked.state_dict().items() if not name.startswith(("head.", "mask_token"))}
    if config.final_norm == "pooled":
        trunk = {f"fc_{name}" if name.startswith("norm.") else name: it for name, it in trunk.items()}
    model.load_state_dict(fresh | trunk)
    return model
