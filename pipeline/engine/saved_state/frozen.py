"""Freeze the parts of a model that the recipe names, and checkpoint their exact weights.

In half precision the forward pass uses rounded values, which DeepSpeed would save. Exact ones stay on the CPU (4 bytes
a frozen parameter on each rank), and rank 0 writes them.
"""

from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine.saved_state.reading import read_state
from shardvit.pipeline.optimizers.parameter_groups import is_head

FILE = "frozen.pt"  # in a checkpoint, next to DeepSpeed's files
_PARTS: dict[str, Callable[[str], bool]] = {
    "trunk": lambda name: not is_head(name),
    "head": is_head,
    "patch_embedding": lambda name: name.startswith("patch_embed."),
    "positions": lambda name: name.startswith(("pos_embed", "position.")) or name.endswith((".relative", ".freqs")),
    "class_token": lambda name: name == "cls_token",
    "registers": lambda name: name == "reg_token",
    "distillation_token": lambda name: name == "dist_token",
}


def freeze(model: nn.Module, frozen: tuple[str, ...], *, key: str) -> None:
    """UserError, naming the recipe's `key`, if an entry matches nothing or nothing is left to train."""
    names = [name for name, _ in model.named_parameters()]
    for each in frozen:
        chosen = _PARTS.get(each, lambda name, pattern=each: fnmatchcase(name, pattern))
        found = {name for name in names if chosen(name)}
        if not found:
            parts = [part for part, is_its in _PARTS.items() if any(map(is_its, names))]
            near = get_close_matches(each, [*parts, *names], n=3, cutoff=0.5)
            raise UserError(
                f"{key}: {each!r} is no part of this model: "
                + (f"the nearest are {', '.join(near)}" if near else f"give {', '.join(parts)}, or a pattern")
            )
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.requires_grad = False
    if frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{key}: {', '.join(frozen)} is all of the model, and nothing is left to train: leave some out")


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the frozen weights to the CPU, in float32."""
    found = {name: p.detach().float().cpu() for name, p in model.named_parameters() if not p.requires_grad}
    return {name: tensor.clone() for name, tensor in found.items()}


def read_frozen(folder: Path) -> dict[str, Tensor]:
    """Read them from DeepSpeed's `folder`; empty if it has no such file."""
    file = folder / FILE
    return dict(read_state(file)["weights"]) if file.exists() else {}


def put_frozen(parameter: Any, values: Tensor, *, rank: int) -> None:
    """Copy a whole parameter's values in; under ZeRO 3, this rank's piece of them."""
    if hasattr(parameter, "ds_tensor"):
        piece, flat = parameter.ds_tensor, values.flatten()
        first = rank * piece.numel()
        count = max(0, min(piece.numel(), flat.numel() - first))
        if count:
            piece.detach().view(-1).narrow(0, 0, count).copy_(flat.narrow(0, first, count))
    else:
        parameter.detach().copy_(values)
