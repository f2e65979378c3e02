"""Masked autoencoder (MAE, arXiv 2111.06377): an encoder of the visible patches, and a small decoder of all.

As facebookresearch/mae `models_mae.py`: positions are added, most patches are left out, and the trunk encodes the rest
(a quarter by default, so it costs a third of a plain model's step or less). The decoder gets these tokens and a learned
`mask_token` in each hidden patch's place, adds its own fixed positions, and predicts the pixels of the hidden patches;
those of visible ones, which have no loss, are not computed. The caller draws the patches, so counts are static. The
decoder's tokens stay in drawn order, since attention does not mind, instead of being put back in the image's: no
gradient flows through an indexed read but that of the visible patches, each read once, so a resume is exact.

With the usual learned positions the trunk's are MAE's fixed sine waves in this stage, and `classifier_of` makes them
learned ones, as MAE's fine-tuning does; `position: sincos_2d` stays big_vision's. A hybrid's stem sees hidden pixels.
Without masks the forward pass gives features of whole images (few-shot sets, pictures); it never runs the decoder.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import get_act_layer
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional

from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.init import initialise
from shardvit.model.layers.chosen_tokens import chosen_tokens
from shardvit.model.positions.embedding import SinCos2d, sincos_2d, starting_numbers
from shardvit.model.vit import TIMM_GELU, PositionedVit, build_model, encode


class Decoder(nn.Module):
    """Predict hidden patches [n, M, pixels] from encoded tokens [n, P + K, D]; pixels row by row, channels last."""

    positions: Tensor

    def __init__(self, config: ModelConfig, sizes: DecoderConfig, *, grid_size: int) -> None:
        super().__init__()
        norm: Any = partial(nn.LayerNorm, eps=config.layer_norm_eps)
        self.embed = nn.Linear(config.sizes.width, sizes.width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
        block: Any = partial(Block, sizes.width, sizes.heads, qkv_bias=True, norm_layer=norm)
        act_layer = get_act_layer(TIMM_GELU[config.gelu])
        self.blocks = nn.Sequential(*(block(act_layer=act_layer) for _ in range(sizes.depth)))
        self.norm = norm(sizes.width)
        self.predict = nn.Linear(sizes.width, config.channels * config.sizes.patch_size**2)
        self.register_buffer("positions", sincos_2d(grid_size, sizes.width, law="mae"), persistent=False)

    def forward(self, encoded: Tensor, kept: Tensor, hidden: Tensor) -> Tensor:
        """`kept` [n, K] and `hidden` [n, M], int64: the patches' numbers; P prefix tokens come first."""
        tokens = self.embed(encoded)
        prefix = tokens.shape[1] - kept.shape[1]
        masks = self.mask_token.to(tokens.dtype).expand(len(tokens), hidden.shape[1], -1)
        positions = self.positions[torch.cat([kept, hidden], dim=1)].to(tokens.dtype)
        tokens = torch.cat([tokens, masks], dim=1) + functional.pad(positions, (0, 0, prefix, 0))
        return self.predict(self.norm(self.blocks(tokens)[:, -hidden.shape[1] :]))


class MaskedAutoencoderVit(PositionedVit):
    """A trunk with a `decoder`; `head` only marks where the features of whole images pass."""

    decoder: Decoder

    def forward(self, images: Tensor, kept: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Images [n, C, S, S] -> pixels [n, M, C * patch_size^2] of the patches `hidden` [n, M], from `kept` [n, K]
        alone (int64, no patch twice); without them features [n, D] of whole images."""
        tokens = self._pos_embed(self.patch_embed(images))
        if kept is None or hidden is None:
            return self.head(self.pool(encode(self, tokens)))
        prefix, patches = tokens.tensor_split([self.num_prefix_tokens], dim=1)
        visible = torch.cat([prefix, chosen_tokens(patches, kept)], dim=1)
        return self.decoder(encode(self, visible), kept, hidden)


def trunk_config(config: ModelConfig) -> ModelConfig:
    """The trunk while it is an encoder: a class token where the model has one, a norm over all tokens, no learned
    positions. ValueError for what cannot leave out patches."""
    if config.kind == "resnet":
        raise ValueError("a masked autoencoder needs patches to leave out: take a Transformer or a hybrid")
    if config.position not in ("learned_1d", "sincos_2d") or config.position_at != "stem" or config.rope != "none":
        raise ValueError(
            "a masked autoencoder needs positions that are added once, before patches are left out: take position "
            f"learned_1d or sincos_2d, not {config.position} at {config.position_at}, and no rope"
        )
    changes = {"position": "sincos_2d", "class_token_position": "learned", "class_token": "pooled"}
    pool = "cls" if config.has_class_token else "gap"
    return config.model_copy(update=changes | {"pool": pool, "final_norm": "tokens"})


def build_masked_autoencoder(config: ModelConfig, *, image_size: int, decoder: DecoderConfig) -> MaskedAutoencoderVit:
    """Build the model with placeholder weights: the trunk's state without positions, and "decoder.". ValueError as in
    `build_model` and `trunk_config`, and for a single patch."""
    trunk = trunk_config(config)
    grid_size = config.grid_size(image_size)
    if grid_size < 2:
        raise ValueError("a masked autoencoder needs at least two patches: take more pixels, or smaller patches")
    model = build_model(trunk, image_size=image_size, num_classes=1, head="linear")
    # Another forward pass over the same modules.
    model.__class__ = MaskedAutoencoderVit  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(model, MaskedAutoencoderVit)
    if config.position == "learned_1d":
        prefix = model.num_prefix_tokens
        model.position.tables[0] = SinCos2d(grid_size, config.sizes.width, num_prefix_tokens=prefix, law="mae")
    model.global_pool = "token" if config.pool == "cls" else "avg"  # of the features
    model.head = nn.Identity()
    with torch.random.fork_rng(devices=[]):
        model.decoder = Decoder(config, decoder, grid_size=grid_size)
    return model


def classifier_of(
    model: MaskedAutoencoderVit, *, config: ModelConfig, image_size: int, num_classes: int, seed: int
) -> nn.Module:
    """Copy the trunk in float32, without decoder, and add a zero linear layer for classes. Learned positions begin at
    the fixed ones; attention pooling and a norm after pooling, which replaces the trunk's, at their initial values
    for `seed`. ValueError if `num_classes` is not positive."""
    classifier = build_model(config, image_size=image_size, num_classes=num_classes, head="linear")
    initialise(classifier, seed=seed)
    state = classifier.state_dict()
    state |= {name: tensor for name, tensor in model.state_dict().items() if name in state}
    classifier.load_state_dict(state | starting_numbers(config, image_size=image_size))
    return classifier


def patches_of(images: Tensor, *, patch_size: int) -> Tensor:
    """Images [n, C, S, S] -> pixels of each patch, [n, N, C * patch_size^2], row by row, channels last."""
    grid = images.shape[-1] // patch_size
    patches = images.unflatten(3, (grid, patch_size)).unflatten(2, (grid, patch_size))  # [n, C, grid, p, grid, p]
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def standardised(patches: Tensor) -> Tensor:
    """Each patch [..., pixels] minus its mean, over its deviation (unbiased, 1e-6 added to the variance)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()
