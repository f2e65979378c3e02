"""timm's NaFlexVit against our blocks, weights and interpolation: what docs/design.md says of other shapes."""

import torch
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch.nn import functional as F

from shardvit.model.config import ModelConfig
from shardvit.model.positions.interpolation import side_weights
from shardvit.model.vit import build_model

TOKENS, SIDE, PATCH, WIDTH = 256, 16, 4, 48
GRIDS = ((16, 16), (14, 18), (13, 19), (12, 21), (18, 14))  # rows and columns that a budget of 256 tokens takes


def test_masked_tokens_of_any_shape_give_timms_logits() -> None:
    """One product gives every image its positions; shapes are the same for all images, and nothing is asked of them."""
    config = ModelConfig(width=WIDTH, depth=2, heads=3, patch_size=PATCH, pool="gap", gelu="erf", interpolation="timm")
    ours = build_model(config, image_size=SIDE * PATCH, num_classes=5, head="linear").eval()
    draw = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    cfg = NaFlexVitCfg(
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=2,
        num_heads=3,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
        pos_embed_grid_size=(SIDE, SIDE),
        embed_proj_type="linear",
    )
    theirs = NaFlexVit(cfg, num_classes=5).eval()
    state = ours.state_dict()
    kernel = state.pop("patch_embed.proj.weight").permute(0, 2, 3, 1).flatten(1)  # pixel by pixel, as they lay a patch
    embeds = {
        "embeds.proj.weight": kernel,
        "embeds.proj.bias": state.pop("patch_embed.proj.bias"),
        "embeds.pos_embed": state.pop("pos_embed").unflatten(1, (SIDE, SIDE)),
    }
    theirs.load_state_dict({**embeds, **state})

    patches = torch.zeros(len(GRIDS), TOKENS, 3 * PATCH**2)
    coordinates = torch.zeros(len(GRIDS), TOKENS, 2, dtype=torch.long)
    valid = torch.zeros(len(GRIDS), TOKENS, dtype=torch.bool)
    weights = torch.zeros(len(GRIDS), TOKENS, SIDE**2)
    for image, (rows, columns) in enumerate(GRIDS):
        count = rows * columns
        patches[image, :count] = torch.randn(count, 3 * PATCH**2, generator=draw)
        coordinates[image, :count] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        valid[image, :count] = True
        down, across = (side_weights(SIDE, n, kernel="timm", device=patches.device).float() for n in (rows, columns))
        weights[image, :count] = torch.kron(down, across)

    mask = valid[:, None, None, :].expand(-1, 1, TOKENS, -1)
    with torch.no_grad():
        tokens = F.linear(patches, kernel, embeds["embeds.proj.bias"])
        tokens = tokens + weights @ ours.pos_embed[0]
        for block in ours.get_submodule("blocks").children():
            tokens = block(tokens, attn_mask=mask)
        kept = ours.norm(tokens) * valid[..., None]
        found = ours.head(kept.sum(1) / valid.sum(1, keepdim=True))
        expected = theirs({"patches": patches, "patch_coord": coordinates, "patch_valid": valid})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
