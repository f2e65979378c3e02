"""Loss and top-1 over a held-out set: every sample exactly once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from data_shards.batch import Batch, model_input
from pipeline.engine import Engine
from pipeline.ranks import Ranks


def evaluate(
    batches: Iterable[Batch],
    *,
    engine: Engine,
    ranks: Ranks,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Evaluate; collective.

    Args:
        batches: this rank's part, padded so that all ranks have equally many.
        engine: with the model.
        ranks: the processes.
        loss_function: mean loss of logits [n, classes] and labels [n].

    Returns:
        "val/loss", "val/top1" (share of all samples) and "val/images".
    """
    engine.module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)  # loss, correct, images
    for batch in batches:
        logits = engine.predict(model_input(batch, device=engine.device, dtype=engine.input_dtype)).float()
        counted = batch.counted.to(engine.device)
        logits, labels = logits[counted], batch.labels.to(engine.device)[counted]
        if len(labels):
            sums[0] += loss_function(logits, labels).double() * len(labels)
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    engine.module.train()
    loss, correct, images = ranks.gather(sums).sum(dim=0).tolist()
    return {"val/loss": loss / images, "val/top1": correct / images, "val/images": images}
