"""A checkpoint's complete float32 weights, without the processes that wrote it: 4 bytes a parameter, seconds for ViT-L.

`engine.portable` reads it on the CPU: the same bits as the engine's `weights` at that step. Does not import DeepSpeed,
run code from a file (`engine.reading`), look for damage (`store.damage_of` does) or restore an optimizer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from data_shards.errors import UserError
from pipeline.checkpoint.identity import read_state_file
from pipeline.engine.saved_state.average import AVERAGE
from pipeline.engine.saved_state.portable import WEIGHT, open_state
from pipeline.recipe.vocabulary import WeightsKind


def checkpoint_weights(folder: Path, *, model: nn.Module, of: WeightsKind = "weights") -> dict[str, Tensor]:
    """The weights of RUNS/NAME/STAGE/checkpoints/step-*, or their moving average, under the names of `model`, float32
    on the CPU. `model`, perhaps on the meta device, gives names, order and shapes. Does not look for damage.

    Raises:
        UserError: the checkpoint is of another model, or no engine wrote it.
    """
    try:
        identity = read_state_file(folder)["identity"]
        layout = {key: identity[key] for key in ("backend", "zero_stage", "processes")}
        return assemble(folder, **layout, model=model, of=of)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # well-formed, but not ours
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"checkpoint {folder} is not what an engine writes ({reason}): take another one") from error


def assemble(
    folder: Path,
    *,
    backend: str,
    zero_stage: int,
    processes: int,
    model: nn.Module,
    of: WeightsKind = "weights",
) -> dict[str, Tensor]:
    """The weights that so many processes' engines wrote; float32 on the CPU; UserError if they are another model's, or
    have no moving average and that is wanted."""
    saved = open_state(folder, backend=backend, zero_stage=zero_stage, processes=processes, model=model)
    # Copies: the checkpoint may be removed while they are in use.
    if of == "ema" and saved.average_updates is None:
        raise UserError(f"checkpoint {folder} has no moving average of the weights: its stage was trained without ema")
    tensors = {"weights": WEIGHT, "ema": AVERAGE}[of]
    state = {name: saved.whole(name, of=tensors).clone() for name in saved.shapes}
    state.update({name: buffer.detach().to(torch.float32) for name, buffer in saved.buffers.items()})
    return state
