"""Blocks that came after the paper, by themselves and together, as keys of `model:`."""

from typing import Any

LATER_BLOCKS: list[dict[str, Any]] = [
    {"registers": 4},
    {"registers": 4, "class_token_position": "none", "layer_scale": 1e-5},
    {"class_token": "kept"},
    {"class_token": "kept", "registers": 2, "final_norm": "pooled"},
    {"final_norm": "pooled"},
    {"qk_norm": "per_head"},
    {"norm": "rms"},
    {"mlp": "swiglu"},
    {"mlp": "swiglu_norm", "norm": "rms", "qk_norm": "per_head"},
    {"rope": "axial", "position": "none"},
    {"rope": "axial", "class_token_position": "none", "registers": 1},
    {"rope": "mixed", "position": "none", "qk_norm": "per_head"},
    {"rope": "eva", "mlp": "swiglu", "class_token": "kept", "final_norm": "pooled"},
    {"rope": "dinov3", "position": "none", "registers": 4, "class_token": "kept", "layer_scale": 1e-5, "norm": "rms"},
    {"rope": "axial", "position": "sincos_2d", "mlp": "swiglu_norm"},
    {"registers": 3, "position": "relative"},
    {"registers": 3, "position": "learned_2d", "position_at": "every_layer"},
]


def fitting(more: dict[str, Any], *, pool: str) -> dict[str, Any]:
    """With another pooling: without the keys that it has no use for."""
    kept = {"pool": pool, **more}
    if pool != "gap":
        kept.pop("final_norm", None)
    if pool == "cls":
        kept.pop("class_token", None)
    if pool != "cls" and not ("registers" in kept or "class_token" in kept):
        kept.pop("class_token_position", None)
    return kept
