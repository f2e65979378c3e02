"""The weights inside a checkpoint, whole and in float32, without the processes that wrote it.

DeepSpeed's shards are put together on the CPU: about 16 bytes of memory a parameter for a moment, seconds for ViT-L.
What comes out is, to the last bit, what the engine's `weights` gives at that step. DeepSpeed's files are pickles, so
this is for checkpoints of one's own runs. It neither looks for damage (`pipeline.checkpoint.damage_of` does) nor
restores an optimizer.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from data_shards.errors import UserError
from pipeline.engine_accelerate import FILE as ACCELERATE_FILE
from pipeline.engine_deepspeed import TAG
from pipeline.identity import STATE
from pipeline.optim import parameter_groups


def checkpoint_weights(folder: Path, *, model: nn.Module) -> dict[str, Tensor]:
    """The weights of the checkpoint `folder` under the names of `model`, float32 on the CPU.

    Args:
        folder: RUNS/NAME/STAGE/checkpoints/step-*, undamaged.
        model: the stage's model, which may be on torch's meta device: only names and order are read.

    Raises:
        UserError: the checkpoint is of another model.
    """
    identity = json.loads((folder / STATE).read_text(encoding="utf-8"))["identity"]
    state = assemble(folder, backend=identity["backend"], zero_stage=identity["zero_stage"], model=model)
    names = set(model.state_dict())
    if set(state) != names:
        odd = sorted(set(state) ^ names)[0]
        raise UserError(f"checkpoint {folder} is of another model than its recipe says: {odd} is in one of them only")
    return state


def assemble(folder: Path, *, backend: str, zero_stage: int, model: nn.Module) -> dict[str, Tensor]:
    """The weights in what an engine's `save` wrote into `folder`; float32 on the CPU."""
    match backend, zero_stage:
        case "accelerate", _:
            state = torch.load(folder / ACCELERATE_FILE, map_location="cpu", weights_only=True)["model"]
        case _, 0:
            state = _unsharded(folder / TAG / "mp_rank_00_model_states.pt", model=model)
        case _:
            state = _sharded(folder)
    return {name: tensor.detach().to(torch.float32) for name, tensor in state.items()}


def _sharded(folder: Path) -> dict[str, Tensor]:
    """ZeRO 1 to 3: DeepSpeed's own tool, without its progress and without its wonder at finding no GPU."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
    assert state is not None
    return dict(state)


def _unsharded(file: Path, *, model: nn.Module) -> dict[str, Tensor]:
    """ZeRO 0, which DeepSpeed's tool does not know (its issue 6699): float32 weights, or half ones and masters."""
    content = torch.load(file, map_location="cpu", weights_only=False)
    state: dict[str, Tensor] = dict(content["module"])
    masters = content["optimizer"].get("fp32_groups")
    if masters is None:
        return state
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group, group_masters in zip(parameter_groups(model, weight_decay=0.0), masters, strict=True):
        for parameter, master in zip(group["params"], group_masters, strict=True):  # pyright: ignore[reportArgumentType]
            state[names[id(parameter)]] = master
    return state
