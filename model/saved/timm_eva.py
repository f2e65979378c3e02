"""timm's Eva, which has the models with RoPE: its arguments for ours, and its parameter names to ours and back.

Our model is a VisionTransformer with timm's AttentionRope (`model.positions.rotary`); Eva computes the same under some
other names: layer scale, SwiGLU's two halves where a norm follows, the learned frequencies of all blocks in one. No
torch until tensors are renamed, which shares or copies them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardvit.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_FREQS = "rope.freqs"  # [2, blocks, heads, head size / 2]


def eva_objection(config: ModelConfig) -> str | None:
    """Why Eva cannot compute this model with RoPE, or None."""
    if config.position not in ("learned_1d", "sincos_2d", "none") or config.position_at != "stem":
        return f"timm has no position embedding {config.position} at {config.position_at}"
    if config.mlp == "gelu" and config.gelu != "erf":
        return "timm's models with RoPE have the erf form of GELU: train with gelu erf"
    if config.pool == "map" and (config.prefix_tokens or config.mlp != "gelu"):
        return "timm's models with RoPE pool class token and registers by attention too, and with a GELU MLP"
    return None


def eva_entry(config: ModelConfig) -> str:
    """A model of timm with this norm and epsilon 1e-6, which `eva_json` gives all other sizes."""
    return "vit_base_patch16_rope_224" if config.norm == "layer" else "vit_base_patch16_sapiens2"


def eva_json(config: ModelConfig, *, image_size: int) -> dict[str, Any]:
    """Plain JSON arguments with which timm's entry point builds this model."""
    from shardvit.model.positions.rotary import eva_arguments
    from shardvit.model.vit import mlp_ratio, timm_arguments

    sizes, same = config.sizes, timm_arguments(config, image_size=image_size)
    kept = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "qkv_bias", "class_token", "global_pool")
    return {name: same[name] for name in (*kept, "in_chans") if name in same} | {
        "mlp_ratio": mlp_ratio(sizes.width, sizes.mlp_dim),
        "swiglu_mlp": config.mlp != "gelu",
        "scale_mlp": config.mlp == "swiglu_norm",
        "qkv_fused": True,
        "qk_norm": config.qk_norm == "per_head",
        "num_kv_heads": None,
        "init_values": config.layer_scale,
        "attn_only_layer_scale": False,
        "attn_type": "rope",
        "num_reg_tokens": config.registers,
        "no_embed_class": config.class_token_position == "none",
        "use_abs_pos_emb": config.position != "none",
        "use_fc_norm": config.final_norm == "pooled",
        "dynamic_img_size": False,
        "rope_rescale_coords": None,
        **eva_arguments(config.rope),
    }


def to_eva(state: Mapping[str, Tensor], *, config: ModelConfig) -> dict[str, Tensor]:
    """Rename our parameters to Eva's."""
    import torch

    renamed: dict[str, Tensor] = {}
    freqs: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.attn\.freqs", name):
            freqs[int(match[1])] = tensor
        elif config.mlp == "swiglu_norm" and (match := re.fullmatch(r"(blocks\.\d+\.mlp\.fc1)(\..*)", name)):
            gate, value = tensor.chunk(2)
            renamed |= {f"{match[1]}_g{match[2]}": gate, f"{match[1]}_x{match[2]}": value}
        else:
            renamed[re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name)] = tensor
    if freqs:
        renamed[_FREQS] = torch.stack([freqs[block] for block in sorted(freqs)], dim=1)
    return renamed


def from_eva(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Eva's parameters to ours; q, k and v become one, with zeros for k's bias where only it is missing."""
    import torch

    renamed = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): tensor for name, tensor in state.items()}
    if _FREQS in renamed:
        parts = renamed.pop(_FREQS).unbind(dim=1)
        renamed |= {f"blocks.{block}.attn.freqs": part for block, part in enumerate(parts)}
    for name in list(renamed):
        block, _, part = name.rpartition(".attn.")
        match part:
            case "q_proj.weight":
                parts = [renamed.pop(f"{block}.attn.{letter}_proj.weight") for letter in "qkv"]
                renamed[f"{block}.attn.qkv.weight"] = torch.cat(parts)
            case "q_proj.bias" | "q_bias":
                of_q, of_v = renamed.pop(name), renamed.pop(f"{block}.attn.v{part[1:]}")
                of_k = renamed.pop(f"{block}.attn.k{part[1:]}", torch.zeros_like(of_q))
                renamed[f"{block}.attn.qkv.bias"] = torch.cat([of_q, of_k, of_v])
            case _ if ".mlp.fc1_g." in name:
                both = name.replace("fc1_g", "fc1")
                renamed[both] = torch.cat([renamed.pop(name), renamed.pop(name.replace("fc1_g", "fc1_x"))])
            case _:
                pass
    return renamed
