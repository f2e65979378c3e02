"""A hundred steps of facebookresearch/mae beside ours: same weights, same batches, same hidden patches, float32, CPU.

    git clone https://github.com/facebookresearch/mae
    python -m shardvit.launch.bench.mae_original mae > records/mae.txt

The original is imported from that folder as it is. Its timm 0.3.2 gave `Block` an argument, and numpy a name, that
today's lack: both are put back for the import. Its own random masks are replaced by ours. Takes two minutes.
"""

import argparse
import importlib
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import timm.models.vision_transformer as of_timm
import torch
from torch import Tensor, nn

from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.init import initialise
from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder, patches_of, standardised
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.recipe.optimizer import OptimizerConfig

STEPS, BATCH, SIZE, PATCH = 100, 16, 64, 8
SIZES: dict[str, Any] = {"width": 192, "depth": 6, "heads": 6}
DECODER = DecoderConfig(width=128, depth=3, heads=4)
OPTIMIZER = OptimizerConfig(name="adamw", lr=1.5e-3, weight_decay=0.05, betas=(0.9, 0.95), clip_grad_norm=0)
_OWN_NAMES = {"decoder.embed": "decoder_embed", "decoder.norm": "decoder_norm", "decoder.predict": "decoder_pred"}
_OWN_NAMES |= {"decoder.mask_token": "mask_token", "decoder.blocks": "decoder_blocks"}

Steps = Callable[[Tensor, Tensor], float]  # images, drawn order of patches -> loss, after which the weights have moved


def original(folder: Path) -> nn.Module:
    """Build the original's model of our sizes, with its own initial weights."""
    block = of_timm.Block

    class Block(block):
        def __init__(self, *arguments: Any, qk_scale: None = None, **more: Any) -> None:
            super().__init__(*arguments, **more)

    of_timm.Block = Block
    setattr(np, "float", float)  # noqa: B010 - numpy refuses the name to type checkers
    sys.path.insert(0, str(folder))
    theirs = importlib.import_module("models_mae")
    of_timm.Block = block
    return theirs.MaskedAutoencoderViT(
        img_size=SIZE,
        patch_size=PATCH,
        embed_dim=SIZES["width"],
        depth=SIZES["depth"],
        num_heads=SIZES["heads"],
        decoder_embed_dim=DECODER.width,
        decoder_depth=DECODER.depth,
        decoder_num_heads=DECODER.heads,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        norm_pix_loss=True,
    )


def theirs(model: Any, *, tokens_decay: bool) -> Steps:
    """The original's step; decay as in timm 0.3.2's `add_weight_decay`, perhaps without class and mask token."""
    exempt = () if tokens_decay else ("cls_token", "mask_token")
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    free = [each for name, each in named if each.ndim == 1 or name.endswith(".bias") or name in exempt]
    rest = [each for _, each in named if not any(each is other for other in free)]
    groups = [{"params": free, "weight_decay": 0.0}, {"params": rest, "weight_decay": OPTIMIZER.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas)

    def step(images: Tensor, order: Tensor) -> float:
        restore = order.argsort(dim=1)

        def given(x: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
            kept = int(x.shape[1] * (1 - ratio))
            visible = torch.gather(x, 1, order[:, :kept, None].expand(-1, -1, x.shape[2]))
            mask = torch.ones(x.shape[:2])
            mask[:, :kept] = 0
            return visible, torch.gather(mask, 1, restore), restore

        model.random_masking = given
        loss = model(images, mask_ratio=0.75)[0]
        return _moved(optimizer, loss)

    return step


def ours(state: dict[str, Tensor], *, tokens_decay: bool) -> Steps:
    """Our step: model, targets, loss and parameter groups of the product, from the original's weights."""
    config = ModelConfig(**SIZES, patch_size=PATCH, gelu="erf")
    model = build_masked_autoencoder(config, image_size=SIZE, decoder=DECODER)
    model.load_state_dict({name: state[_their_name(name)] for name in model.state_dict()})
    on = "matrices_and_tokens" if tokens_decay else "kernels"
    optimizer = build_optimizer(model, OPTIMIZER.model_copy(update={"weight_decay_on": on}))

    def step(images: Tensor, order: Tensor) -> float:
        kept, hidden = order.tensor_split([order.shape[1] // 4], dim=1)
        patches = patches_of(images, patch_size=PATCH)
        targets = standardised(patches.gather(1, hidden[..., None].expand(-1, -1, patches.shape[-1])))
        return _moved(optimizer, (model(images, kept, hidden) - targets).square().mean())

    return step


def _moved(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _their_name(name: str) -> str:
    return next((new + name[len(old) :] for old, new in _OWN_NAMES.items() if name.startswith(old)), name)


def largest_difference(folder: Path, *, tokens_decay: bool) -> tuple[list[float], float]:
    """Train both for `STEPS`; return the original's losses and the largest difference of a step's losses."""
    torch.manual_seed(0)
    model = original(folder)
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    both, losses, worst = (
        (theirs(model, tokens_decay=tokens_decay), ours(state, tokens_decay=tokens_decay)),
        list[float](),
        0.0,
    )
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        coarse = torch.randn(BATCH, 3, 3, 3, generator=draw)  # smooth images, which can be filled in
        images = nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic")
        order = torch.rand(BATCH, (SIZE // PATCH) ** 2, generator=draw).argsort(dim=1)
        original_loss, our_loss = (step(images, order) for step in both)
        losses.append(original_loss)
        worst = max(worst, abs(original_loss - our_loss))
    return losses, worst


def initial_deviations(folder: Path) -> list[tuple[str, float, float]]:
    """Standard deviation of each kind of parameter at the start: the original's, and ours (`init: mae`)."""
    torch.manual_seed(0)
    first = original(folder).state_dict()
    config = ModelConfig(**SIZES, patch_size=PATCH, gelu="erf")
    model = build_masked_autoencoder(config, image_size=SIZE, decoder=DECODER)
    initialise(model, seed=0, style="mae")
    kinds = ("cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    kinds += ("decoder.mask_token", "decoder.embed.weight", "decoder.blocks.0.mlp.fc2.weight", "decoder.predict.weight")
    second = model.state_dict()
    return [(name, first[_their_name(name)].std().item(), second[name].std().item()) for name in kinds]


def largest_of_positions(folder: Path) -> float:
    """Largest difference between the fixed positions, which both compute for themselves."""
    state = original(folder).state_dict()
    config = ModelConfig(**SIZES, patch_size=PATCH, gelu="erf")
    model = build_masked_autoencoder(config, image_size=SIZE, decoder=DECODER)
    of_encoder = model.position.tables[0].get_buffer("table") - state["pos_embed"][0]
    of_decoder = model.decoder.positions - state["decoder_pos_embed"][0, 1:]
    return max(each.abs().max().item() for each in (of_encoder, of_decoder))


def main() -> None:
    """Print the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkout of facebookresearch/mae")
    folder = parser.parse_args().folder
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, timm {timm.__version__}, float32")
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    print(f"encoder {sizes}; decoder {DECODER.width}, {DECODER.depth}, {DECODER.heads}; {SIZE} px, patches of {PATCH};")
    print(f"batch {BATCH}, mask ratio 0.75, AdamW {OPTIMIZER.lr:g}, decay {OPTIMIZER.weight_decay:g}, {STEPS} steps\n")
    for decay, words in ((False, "decay of kernels alone"), (True, "of class and mask token, too, as the original")):
        losses, worst = largest_difference(folder, tokens_decay=decay)
        shown = f"loss {losses[0]:.6f} -> {losses[-1]:.6f}"
        print(f"{words:<46} {shown}, largest difference of a step's loss {worst:.1e}")
    print(f"\nfixed positions of encoder and decoder: largest difference {largest_of_positions(folder):.1g}")
    print("\ninitial deviation                 original      ours")
    for name, of_theirs, of_ours in initial_deviations(folder):
        print(f"{name:<32} {of_theirs:9.5f} {of_ours:9.5f}")


if __name__ == "__main__":
    main()
