"""One of two ranks that trains each kind of model for a few steps, once as it is and once with collectives that put
nothing in place before they are waited for.

Started by test_overlap.py as `python overlap_worker.py OUT RANK WORLD`; rank 0 writes OUT/results.pt.
"""

import copy
import importlib.util
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from shardvit.data_shards.errors import UserError
from shardvit.model.init import initialise
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.ranks.group import Ranks

_spec = importlib.util.spec_from_file_location("engine_worker", Path(__file__).with_name("engine_worker.py"))
common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(common)

STEPS, BUCKET = 3, 1024  # elements; a block has more
CASES = [
    *((kind, 1, "fp32", 1) for kind in ("mlp head", "masked", "hybrid", "resnet", "map", "learned_2d")),
    *(("vit", stage, "bf16", 2) for stage in (1, 2)),
]


class Late:
    """A collective of which the result is NaN until `wait`."""

    waiting: ClassVar[list["Late"]] = []

    def __init__(self, collective: Any, output: Tensor, source: Tensor) -> None:
        self._call, self._output, self._source = collective, output, source
        kept = source.clone()
        output.detach().fill_(float("nan"))
        if output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            source.detach().copy_(kept)  # gathered in place
        self.waiting.append(self)

    def wait(self) -> None:
        self._call(self._output, self._source)
        self.waiting.remove(self)


def late(collective: Any) -> Any:
    return lambda output, source, async_op=False: (
        Late(collective, output, source) if async_op else collective(output, source)
    )


def build(kind: str, recipe: Any) -> nn.Module:
    if kind == "masked":
        model = build_masked_patch(recipe.model, image_size=common.SIZE)
        initialise(model, seed=3)
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(5))
        return model
    if kind == "mlp head":
        model = common.vit.build_model(recipe.model, image_size=common.SIZE, num_classes=common.CLASSES, head="mlp")
        initialise(model, seed=3)
        return model
    return common.build_model(recipe)


def train(case: tuple[str, int, str, int], ranks: Ranks) -> dict[str, Any]:
    kind, stage, precision, accumulation = case
    recipe = common.recipe_for("deepspeed", stage, precision, model=common.KINDS.get(kind, common.VIT))
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"bucket_elements": BUCKET})})
    plan = common.plan_for(ranks.place.world_size, accumulation=accumulation)
    model = build(kind, recipe)
    engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
    losses, begun_early = [], 0
    for step in range(STEPS):
        for micro in range(accumulation):
            images, labels = common.batch(accumulation * step + micro)
            part = slice(ranks.place.rank * 4, ranks.place.rank * 4 + 4)
            inputs, targets = (images[part].to(engine.input_dtype),), labels[part]
            if kind == "masked":
                source = torch.tensor([[4, 1, 2, 3]] * 4)
                inputs, targets = (*inputs, source, torch.tensor([[0]] * 4)), targets[:, None]
            engine._sharded.settle_first()
            begun_early += bool(Late.waiting)
            outputs = engine.forward(*inputs).float()
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
            assert not Late.waiting, "weights that nobody waited for"
            engine.backward(loss)
            losses.append(loss.item())
        numbers = engine.step(lr=0.01, flags=(False, False))
        losses.append(float(numbers[0]))
    weights = copy.deepcopy(engine.weights())
    buckets = len(engine._sharded._buckets)
    engine.close()
    hooks = sum(len(each._forward_pre_hooks) for each in model.modules() if each is not model)
    hooks += sum(len(each._post_accumulate_grad_hooks or ()) for each in model.parameters())
    return {"losses": losses, "weights": weights, "buckets": buckets, "begun early": begun_early, "hooks": hooks}


class Twice(nn.Module):
    """Its gradient comes in two parts: reentrant checkpointing runs a backward pass within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * common.SIZE**2, common.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1).requires_grad_()
        inside: Any = checkpoint(self.head, x, use_reentrant=True)
        return inside + self.head(2 * x)


def twice(ranks: Ranks, overlap: str) -> str:
    recipe = common.recipe_for("deepspeed", 1, "fp32", overlap)
    plan = common.plan_for(ranks.place.world_size, accumulation=1)
    engine = open_engine(recipe, stage="pretrain", plan=plan, model=Twice(), ranks=ranks)
    try:
        engine.backward(engine.forward(common.batch(0)[0]).square().mean())
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    out, ranks = common.joined()
    results: dict[Any, Any] = {}
    for case in CASES:
        plain = train(case, ranks)
        names = ("all_gather_into_tensor", "reduce_scatter_tensor")
        with mock.patch.multiple(distributed, **{name: late(getattr(distributed, name)) for name in names}):
            results[case] = {"plain": plain, "late": train(case, ranks)}
    results["twice"] = {overlap: twice(ranks, overlap) for overlap in ("on", "off")}
    if ranks.place.is_main:
        torch.save(results, out / "results.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
