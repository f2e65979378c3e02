"""Loss and accuracy on a held-out set: every sample exactly once, at any world size.

The sums stay on the device; the host waits for it once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from data_shards.loading.batch import Batch
from pipeline.engine.protocol import Engine
from pipeline.faults import FaultLedger
from pipeline.ranks.group import Ranks
from pipeline.task import Task, to_device
from pipeline.vocabulary import WeightsKind


def evaluate(
    batches: Iterable[Batch],
    *,
    task: Task,
    engine: Engine,
    ranks: Ranks,
    faults: FaultLedger,
    of: WeightsKind = "weights",
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate `batches`, padded so that all ranks have equally many; collective.

    Damaged images go to `faults` and are not counted; `beat` is called at each batch. Returns "val/loss" and
    "val/SCORE" (`task.score`), means over all predictions, and "val/images", the readable samples. `of` names them: of
    the moving average ("ema") they are "val/ema_loss" and "val/ema_SCORE"; exchanging the weights is the caller's.
    """
    engine.module.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=engine.device)  # loss, right predictions, predictions, images
    for batch in batches:
        beat()
        faults.note(batch, use="eval", rows=len(batch.counted))
        example = task.example(batch, use="eval")
        outputs = engine.predict(*example.inputs).float()
        counted = batch.counted.numpy().nonzero()[0]  # on the host: a GPU would have to be waited for
        targets = example.targets
        if len(counted) < len(targets):
            rows = to_device(torch.from_numpy(counted), engine.device)
            outputs, targets = outputs[rows], targets[rows]
        if len(targets):
            sums[:3] += task.tally(outputs, targets)
            sums[3] += len(targets)
    engine.module.train()
    loss, right, predictions, images = ranks.gather(sums).sum(dim=0).tolist()
    if not images:  # all are damaged, which the budget of damaged images will have its word about
        loss, right, predictions = math.nan, math.nan, 1.0
    mark = {"weights": "", "ema": "ema_"}[of]
    means = {f"val/{mark}loss": loss / predictions, f"val/{mark}{task.score}": right / predictions}
    return means if of == "ema" else {**means, "val/images": images}
