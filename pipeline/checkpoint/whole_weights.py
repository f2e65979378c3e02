"""Assemble a checkpoint's float32 weights without the processes that wrote it: 4 bytes a parameter, seconds for ViT-L.

The same bits as the engine's `weights` at that step, read on the CPU. Does not import DeepSpeed, run code from a file
(`saved_state.reading`), look for damage (`store.damage_of` does) or restore an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        UserError: the checkpoint is of another model, no engine wrote it, or it has no moving average.
    """
    try:
        return assemble(folder, written=read_state_file(folder)["identity"], model=model, of=of)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # well-formed, but not ours
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"checkpoint {folder} is not what an engine writes ({reason}): take another one") from error


def assemble(
    folder: Path, *, written: Mapping[str, Any], model: nn.Module, of: WeightsKind = "weights"
) -> dict[str, Tensor]:
    """The weights of a checkpoint with the identity `written`."""
    saved = open_state(folder, written=written, model=model)
    if of == "ema" and saved.average_updates is None:
        raise UserError(f"checkpoint {folder} has no moving average of the weights: its stage was trained without ema")
    tensors = AVERAGE if of == "ema" else WEIGHT
    state = {name: saved.whole(name, of=tensors).clone() for name in saved.shapes}  # the checkpoint may be removed
    return state | {name: buffer.detach().to(torch.float32) for name, buffer in saved.buffers.items()}
