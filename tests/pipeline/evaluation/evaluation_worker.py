"""One rank of evaluations: a fixed small model on shards that a test has packed.

Started by test_evaluate.py as `python evaluation_worker.py OUT RANK WORLD_SIZE`; each rank writes OUT/rank-RANK.pt.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.model.config import ModelConfig
from shardvit.model.loss import loss_function
from shardvit.model.vit import build_model
from shardvit.pipeline.evaluation.evaluate import Evaluated, evaluate
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.stage.task import Classification

SIZE = 16


def best_is_true(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Top-1, or precision at 1, of each image."""
    rows = torch.arange(len(logits))
    best = logits.argmax(dim=1)
    return targets[rows, best] > 0 if targets.is_floating_point() else best == targets


class Scores:
    """A metric that is no mean over images: it keeps every score, in set order."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        assert len(logits) == len(targets)
        self.seen.append(logits[:, 0])

    def merge(self, other: "Scores") -> None:
        self.seen += other.seen

    def compute(self) -> float:
        every = torch.cat(self.seen).double()
        return float((every * torch.arange(len(every))).sum() / len(every))


def small_model(num_classes: int) -> torch.nn.Module:
    """Sure of itself, and wrong."""
    torch.manual_seed(1)
    config = ModelConfig(width=16, depth=2, heads=2, patch_size=4)
    model = build_model(config, image_size=SIZE, num_classes=num_classes, head="linear")
    torch.nn.init.normal_(model.get_submodule("head").weight, std=2.0)
    return model.eval()


def batches_of(shards: ShardSet, *, rank: int, world_size: int) -> EvalBatches:
    access = Access(shards, on_corrupt="substitute")
    return EvalBatches(access, transform=EvalTransform(SIZE), rank=rank, world_size=world_size, batch_size=4)


def evaluated(folder: Path, *, ranks: Any, kind: Any) -> Evaluated:
    """This rank's part of FOLDER/shards/val, images of `kind` labels."""
    shards = open_shards(str(folder / "shards/val"))
    model = small_model(shards.num_classes)
    engine: Any = SimpleNamespace(
        module=model, device=torch.device("cpu"), input_dtype=torch.float32, predict=torch.inference_mode()(model)
    )
    task = Classification(
        engine=engine,
        classes=shards.classes,
        label_kind=kind,
        normalisation=GOOGLES,
        train_loss=loss_function("sigmoid"),
        loss_kind="softmax" if kind == "single" else "sigmoid",
    )
    part = batches_of(shards, rank=ranks.place.rank, world_size=ranks.place.world_size)
    several = ("precision_at_1", "mean_average_precision")
    return evaluate(
        eval_batches(part, workers=0),
        task=task,
        ranks=ranks,
        faults=SimpleNamespace(note=lambda batch, *, use, rows: None),  # pyright: ignore[reportArgumentType]
        metrics=("top5", "calibration_error") if kind == "single" else several,
        own={"best_is_true": best_is_true, "Scores": Scores},
    )


def main() -> None:
    out, rank, world_size = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    torch.set_num_threads(1)
    ranks = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=out),
        timeout_seconds=400,
    )
    found = {kind: evaluated(out.parent / kind, ranks=ranks, kind=kind) for kind in ("single", "multi")}
    torch.save(found, out / f"rank-{rank}.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
