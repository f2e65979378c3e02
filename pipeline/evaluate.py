"""Loss and top-1 over a held-out set: every sample exactly once, for any number of ranks.

With several labels an image, top-1 is the share of images whose best class is one of theirs (big_vision's prec@1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from data_shards.batch import Batch, LabelKind, model_input, targets
from pipeline.engine import Engine
from pipeline.faults import FaultLedger
from pipeline.ranks import Ranks


def evaluate(
    batches: Iterable[Batch],
    *,
    engine: Engine,
    ranks: Ranks,
    faults: FaultLedger,
    num_classes: int,
    label_kind: LabelKind,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Evaluate; collective.

    Args:
        batches: this rank's part, padded so that all ranks have equally many.
        engine: with the model.
        ranks: the processes.
        faults: takes down damaged images, which are not counted.
        num_classes: of the logits.
        label_kind: one label an image, or several.
        loss_function: mean loss of logits [n, classes] and targets.

    Returns:
        "val/loss", "val/top1" (share of all samples that could be read) and "val/images".
    """
    engine.module.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)  # loss, correct, images
    for batch in batches:
        faults.note(batch, use="eval", rows=len(batch.counted))
        logits = engine.predict(model_input(batch, device=engine.device, dtype=engine.input_dtype)).float()
        wanted = targets(batch, device=engine.device, num_classes=num_classes, label_kind=label_kind)
        counted = batch.counted.to(engine.device)
        logits, wanted = logits[counted], wanted[counted]
        if len(wanted):
            best = logits.argmax(dim=1)
            hit = wanted.gather(1, best[:, None])[:, 0] > 0 if wanted.is_floating_point() else best == wanted
            sums[0] += loss_function(logits, wanted).double() * len(wanted)
            sums[1] += hit.sum()
            sums[2] += len(wanted)
    engine.module.train()
    loss, correct, images = ranks.gather(sums).sum(dim=0).tolist()
    if not images:  # all are damaged, which the budget of damaged images will have its word about
        return {"val/loss": math.nan, "val/top1": math.nan, "val/images": 0.0}
    return {"val/loss": loss / images, "val/top1": correct / images, "val/images": images}
