"""The contenders of `launch.bench.gpu`: peers as their users run them, a bar of plain torch, and ours.

Started as `python -m shardvit.launch.bench.gpu_contenders NAME SIZE COURSE DESCRIPTOR`, or with `ceilings`, each in a
fresh process: compiled code, allocators and monkey-patched torch layers outlive a contender.

    timm            timm's model under autocast, eager, as its train.py --amp --amp-dtype bfloat16
    timm-compile    the same with torch.compile over the whole model
    trainer         transformers' Trainer with its own ViT, bf16 and torch_compile; same weights under its names
    bar             DistributedDataParallel, blocks compiled individually in place, fused AdamW: the best of plain torch
    deepspeed       accelerate's DeepSpeed plugin, ZeRO 1 and bf16, with its defaults
    ours            the product's own engine, model, compilation, task and loss
    ours-2          two processes of it on one GPU, over NCCL or, as NCCL refuses a GPU twice, gloo: the note says which

All clip at 1.0 and use fused AdamW. Peers keep float32 weights (autocast); DeepSpeed and ours keep bfloat16 weights
with float32 masters. Each drives its own loop and calls a `Meter`.
"""

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

from shardvit.launch.bench import gpu_work as work
from shardvit.launch.bench.gpu_meter import SO_FAR, Course, Measured, Meter
from shardvit.launch.bench.measure import Teller
from shardvit.pipeline.ranks.place import Place

Note = str  # for the table; may be empty
_RANK, _RENDEZVOUS = "SHARDVIT_BENCH_RANK", "SHARDVIT_BENCH_RENDEZVOUS"  # of the second process
_LONE = Place()
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1"}


def measure(
    contender: str, *, size: str, course: Course, device: torch.device, tell: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Run a contender in this process; if "measured" is None, "failure" says why. `tell` gets the same as it runs."""
    from torch._dynamo.utils import counters

    found: dict[str, Any] = {"contender": contender, "size": size, "measured": None, "note": "", "failure": None}

    def whole() -> dict[str, Any]:
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return {**found, "graphs": graphs, "graph_breaks": breaks}

    def so_far(measured: Measured) -> None:
        found["measured"] = asdict(measured)
        tell(whole())

    meter = Meter(course, device=device, tell=so_far)
    try:
        found["note"] = CONTENDERS[contender](work.SIZES[size], meter, device)
        found["measured"] = asdict(meter.result())
    except ModuleNotFoundError as error:
        found["failure"] = f"not installed: {error.name}"
    except torch.OutOfMemoryError:
        found["failure"] = "out of memory"
    return whole()


def _timm(size: work.Size, meter: Meter, device: torch.device, *, compiles: bool = False) -> Note:
    model = work.with_seeded_weights(size, device=device)
    call = torch.compile(model, dynamic=False) if compiles else model
    _torch_loop(call, model, size, meter=meter, device=device)
    return ""


def _bar(size: work.Size, meter: Meter, device: torch.device) -> Note:
    _join(device)
    model = work.with_seeded_weights(size, device=device)
    for block in model.get_submodule("blocks").children():
        block.compile(dynamic=False)
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    _torch_loop(wrapped, model, size, meter=meter, device=device)
    distributed.destroy_process_group()
    return ""


def _torch_loop(call: Any, model: nn.Module, size: work.Size, *, meter: Meter, device: torch.device) -> None:
    optimizer, batch = work.adamw(model), work.resident_batch(size, device=device)
    for _ in range(meter.course.steps):
        meter.begin()
        images = work.normalised(batch)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = call(images)
        loss = work.cross_entropy(logits, batch.labels)
        meter.phase_done()
        loss.backward()
        meter.phase_done()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.end(loss)


def _deepspeed(size: work.Size, meter: Meter, device: torch.device) -> Note:
    import deepspeed
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    if device.type == "cpu":  # else it first compiles a shared-memory all-reduce, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    os.environ.update(_ALONE)  # else accelerate silently leaves DeepSpeed out
    _join(device)
    plugin = DeepSpeedPlugin(zero_stage=1, gradient_clipping=work.CLIP)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = size.images
    accelerator: Any = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    module = work.with_seeded_weights(size, device=device)
    model, optimizer = accelerator.prepare(module, work.adamw(module))
    batch = work.resident_batch(size, device=device)
    for _ in range(meter.course.steps):
        meter.begin()
        logits = model(work.normalised(batch, dtype=next(model.parameters()).dtype))
        loss = work.cross_entropy(logits, batch.labels)
        meter.phase_done()
        accelerator.backward(loss)  # accelerate steps DeepSpeed's engine here
        meter.phase_done()
        accelerator.clip_grad_norm_(model.parameters(), work.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.end(loss)
    distributed.destroy_process_group()
    if (kind := type(model).__name__) != "DeepSpeedEngine":
        raise RuntimeError(f"accelerate gave {kind}, not DeepSpeed")
    return ""


def _trainer(size: work.Size, meter: Meter, device: torch.device) -> Note:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    batch = work.resident_batch(size, device=device)
    losses: list[Tensor] = []

    class Metered(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            meter.phase_done()  # its callbacks do not separate forward and backward

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end(losses[-1])

    class Keeping(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            losses[:] = [result[0] if isinstance(result, tuple) else result]
            return result

    model = _transformers_model(size, device=device)
    optimizer = work.adamw(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=size.images,
            max_steps=meter.course.steps,
            bf16=True,
            torch_compile=True,
            max_grad_norm=work.CLIP,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            use_cpu=device.type == "cpu",
        )
        trainer = Keeping(
            model=model,
            args=arguments,
            train_dataset=[0] * size.images,  # ignored by the collator
            data_collator=lambda _: {"pixel_values": work.normalised(batch), "labels": batch.labels},
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            callbacks=[Metered()],
        )
        trainer.train()
    return ""


def _transformers_model(size: work.Size, *, device: torch.device) -> nn.Module:
    """transformers' ViT with the same weights, through the product's export."""
    from transformers import ViTForImageClassification

    from shardvit.model.formats.transformers_state import write_transformers_folder
    from shardvit.model.saved.model_folder import SavedModelMeta

    names = tuple(map(str, range(size.classes)))
    meta = SavedModelMeta(
        model=size.model, image_size=size.image_size, num_classes=size.classes, class_names=names, head="linear"
    )
    state = {name: each.cpu() for name, each in work.with_seeded_weights(size, device=device).state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        write_transformers_folder(Path(folder), state, meta=meta)
        model: Any = ViTForImageClassification.from_pretrained(folder, attn_implementation="sdpa")
    return model.to(device).train()


def _ours(size: work.Size, meter: Meter, device: torch.device, *, place: Place = _LONE) -> Note:
    from shardvit.data_shards.vocabulary import GOOGLES
    from shardvit.model.config import Regularisation
    from shardvit.model.vit import build_model, set_patch_dropout
    from shardvit.pipeline.engine.late_metrics import LateMetrics
    from shardvit.pipeline.engine.open import open_engine
    from shardvit.pipeline.kernels.settle import settled_kernels
    from shardvit.pipeline.recipe.stage_plan import plan_stage
    from shardvit.pipeline.tasks.make_task import make_task

    recipe, (ranks, over) = recipe_of(size, ranks=place.world_size), _ranks(place)
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=10**6, world_size=place.world_size)
    model = build_model(
        recipe.model,
        image_size=size.image_size,
        num_classes=size.classes,
        head="linear",
        regularisation=Regularisation(patch_dropout=size.patch_dropout),
    )
    model.load_state_dict(work.with_seeded_weights(size, device=device).state_dict())
    with settled_kernels(recipe, stage="pretrain", model=model, device=device) as kernels:
        engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
        classes = types.SimpleNamespace(classes=tuple(map(str, range(size.classes))), is_multi_label=False)
        data: Any = types.SimpleNamespace(train=classes)
        task = make_task(recipe, stage="pretrain", data=data, normalisation=GOOGLES, engine=engine)
        batch = work.resident_batch(size, device=device)
        late = LateMetrics(device=engine.device)
        engine.module.train()
        for step in range(1, meter.course.steps + 1):
            if size.patch_dropout:
                set_patch_dropout(engine.module, size.patch_dropout)
            meter.begin()
            example = task.example(batch, use="train")
            loss = task.loss(engine.forward(*example.inputs), example.targets)
            meter.phase_done()
            engine.backward(loss)
            meter.phase_done()
            late.put(step, engine.step(lr=work.LR, flags=(False,) * 3))
            late.ready()
            meter.end(loss)
    ranks.leave()
    shared = [f"{place.world_size} processes on one GPU over {over}; the numbers are each one's"] * (
        place.world_size > 1
    )
    return "; ".join([*shared, *kernels.notes])


def _ours_twice(size: work.Size, meter: Meter, device: torch.device) -> Note:
    """Rank 0 starts rank 1, which measures the same and tells nobody."""
    with tempfile.TemporaryDirectory() as folder:
        rank = int(os.environ.get(_RANK, "0"))
        rendezvous = Path(os.environ.get(_RENDEZVOUS, folder))
        place = Place(rank, 2, local_rank=rank, local_world_size=2, rendezvous=rendezvous, gpu=0)
        if rank == 1:
            return _ours(size, meter, device, place=place)
        other = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *sys.argv[1:4], "1"],
            env={**os.environ, _RANK: "1", _RENDEZVOUS: folder},
            stdout=subprocess.DEVNULL,
        )
        try:
            return _ours(size, meter, device, place=place)
        finally:
            other.kill()
            other.wait()


def _ranks(place: Place) -> tuple[Any, str]:
    """Join the group as the product does; over gloo if NCCL refuses to. Returns it and what it runs over."""
    from shardvit.pipeline.ranks import group

    try:
        return group.Ranks(place, timeout_seconds=120), "NCCL" if torch.cuda.is_available() else "gloo"
    except distributed.DistBackendError as error:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        assert place.rendezvous is not None
        (again := place.rendezvous / "again").mkdir(exist_ok=True)
        over = partial(group.join_group, backend="gloo", gpu=None)
        with mock.patch.object(
            group, "join_group", lambda place, *, timeout_seconds, **_: over(place, timeout_seconds=timeout_seconds)
        ):
            ranks = group.Ranks(replace(place, rendezvous=again), timeout_seconds=120)
        return ranks, f"gloo (NCCL: {str(error).strip().splitlines()[-1]})"


def recipe_of(size: work.Size, *, ranks: int = 1) -> Any:
    """The product's recipe with the hyperparameters that all contenders share, and the engine's defaults."""
    from shardvit.pipeline.recipe.schema import Recipe

    return Recipe.model_validate(
        {
            "name": "gpu-benchmark",
            "model": size.model.model_dump(exclude_defaults=True),
            "data": {"lanes": ranks},
            "engine": {"max_micro_batch_size": size.images},
            "stages": {
                "pretrain": {
                    "train": "none",
                    "eval": "none",
                    "image_size": size.image_size,
                    "global_batch_size": ranks * size.images,
                    "duration": "10000 steps",
                    "head": "linear",
                    "patch_dropout": size.patch_dropout,
                    "optimizer": {
                        "name": "adamw",
                        "lr": work.LR,
                        "weight_decay": work.WEIGHT_DECAY,
                        "betas": work.BETAS,
                        "eps": work.EPS,
                        "clip_grad_norm": work.CLIP,
                    },
                }
            },
        }
    )


def _join(device: torch.device) -> None:
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=0,
        world_size=1,
        store=distributed.HashStore(),
        device_id=device if device.type == "cuda" else None,
    )


CONTENDERS: dict[str, Callable[[work.Size, Meter, torch.device], Note]] = {
    "timm": _timm,
    "timm-compile": partial(_timm, compiles=True),
    "trainer": _trainer,
    "bar": _bar,
    "deepspeed": _deepspeed,
    "ours": _ours,
    "ours-2": _ours_twice,
}


def main() -> None:
    """Measure one contender, or the ceilings, and write the result to the pipe."""
    what, size, course, descriptor = sys.argv[1:5]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    teller = Teller(int(descriptor))

    def tell(so_far: dict[str, Any]) -> None:
        teller.mark(SO_FAR, result=so_far)

    if what == "ceilings":
        from shardvit.launch.bench.gpu_ceilings import ceilings

        result: dict[str, Any] = {}
        for each in ceilings(device=device, sizes=size.split("+")):
            tell(result := asdict(each))
    else:
        result = measure(what, size=size, course=Course(**json.loads(course)), device=device, tell=tell)
    teller.mark("end", result=result)


if __name__ == "__main__":
    main()
