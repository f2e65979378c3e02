"""What the data path hands to training, and its last hop: uint8 pixels -> the model's input, on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """One micro-batch of n samples, as it leaves the loader."""

    images: torch.Tensor  # uint8 [n, size, size, 3]
    mirrored: torch.Tensor  # bool [n]: to be flipped left to right on the device
    labels: torch.Tensor  # int64 [n]
    counted: torch.Tensor  # bool [n]: False for the padding that evens out the ranks' evaluation batches
    samples: torch.Tensor  # int64 [n]: number of the sample in the manifest
    epochs: torch.Tensor  # int64 [n]
    keys: tuple[str, ...]  # WebDataset keys

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; torch's DataLoader calls this where there is a GPU."""
        return replace(
            self,
            images=self.images.pin_memory(),
            mirrored=self.mirrored.pin_memory(),
            labels=self.labels.pin_memory(),
            counted=self.counted.pin_memory(),
        )


def model_input(batch: Batch, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Flip and normalise on the device: -> [n, 3, size, size] of `dtype`, values (x - 127.5) / 127.5.

    The scaling is Google's, in vision_transformer and big_vision alike. It is computed in float32 and rounded once.
    """
    pixels = batch.images.to(device, non_blocking=True).permute(0, 3, 1, 2)
    mirrored = batch.mirrored.to(device, non_blocking=True)
    pixels = torch.where(mirrored[:, None, None, None], pixels.flip(3), pixels)
    return ((pixels.float() - 127.5) / 127.5).to(dtype).contiguous()
