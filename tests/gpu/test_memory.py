"""The plan's peak against what torch has allocated on the GPU: ViT-B/16 at 224 px, some training steps."""

import gc
from typing import Any

import pytest
import torch
from torch.nn import functional

from shardvit.model.vit import build_model, checkpoint_blocks
from shardvit.pipeline.budget import memory
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.stage_plan import plan_stage
from tests.gpu.twenty_steps import ENGINES, forget_accelerate
from tests.pipeline.budget.planning import forecast, recipe

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
IMAGES, CLASSES, SIZE, STEPS = 32, 1000, 224, 3
# Of the planned peak. The plan knows no workspaces (cuBLAS has up to 32 MiB, cuDNN its own) and rounds up activations.
LEAST, MOST = 0.80, 1.10
NEEDED_GB = 16
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"{name}, bf16": (keys, {}) for name, keys in ENGINES.items()},
    "ZeRO 0, fp32": ({"zero_stage": 0, "precision": "fp32"}, {}),
    "ZeRO 1, fp32": ({"precision": "fp32"}, {}),
    "ZeRO 1, bf16, checkpointed": ({"activation_checkpointing": True}, {}),
    "ZeRO 1, bf16, EMA": ({}, {"ema": {"decay": 0.99}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_the_plans(case, ranks: Ranks, device, record_property):
    if device.type == "cpu":
        pytest.skip("a CPU's allocations are counted in tests/pipeline/budget")
    if torch.cuda.get_device_properties(device).total_memory < NEEDED_GB * 1e9:
        pytest.skip(f"it takes a GPU of {NEEDED_GB} GB")
    engine_keys, stage = CASES[case]
    engine_keys = {"precision": "bf16", "compile": "off", **engine_keys}
    made = recipe("B/16", image_size=SIZE, batch=IMAGES, lanes=IMAGES, engine=engine_keys, stage=stage)
    plan = plan_stage(made, stage="pretrain", samples_per_epoch=10**6, world_size=1)
    model = build_model(made.model, image_size=SIZE, num_classes=CLASSES, head="linear")
    if made.engine.checkpointed_every:
        checkpoint_blocks(model, every=made.engine.checkpointed_every)
    gc.collect()  # the engines of earlier cases
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with settled_kernels(made, stage="pretrain", model=model):
        engine = open_engine(made, stage="pretrain", plan=plan, model=model, ranks=ranks)
        engine.module.train()
        images = torch.randn(IMAGES, 3, SIZE, SIZE, device=device).to(engine.input_dtype)
        labels = torch.arange(IMAGES, device=device)
        for step in range(STEPS):
            if step == 1:  # the first chooses kernels
                torch.cuda.reset_peak_memory_stats()
            engine.backward(functional.cross_entropy(engine.forward(images).float(), labels))
            engine.step(lr=1e-4, flags=())
        peak = torch.cuda.max_memory_allocated() - before
        engine.close()
    forget_accelerate(made)
    cost = forecast(made, gpu=None, classes=CLASSES).cost
    config = made.train_stage("pretrain")
    state = memory.state_of(
        cost.parameters,
        engine=made.engine,
        optimizer=config.optimizer,
        plan=plan,
        zero_stage=made.engine.zero_stage,
        ema=config.ema,
    )
    kept = "checkpointed" if made.engine.checkpointed_every else "all"
    planned = state.peak_bytes(IMAGES * cost.image_bytes(kept))
    record_property("peak", f"{peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
    assert LEAST * planned <= peak <= MOST * planned
