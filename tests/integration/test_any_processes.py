"""One run on one, two and four processes, with everything random switched on: the same losses but for rounding."""

import subprocess
from collections.abc import Callable

import pytest

from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.runs.logs import read_metrics
from tests.small_recipe import small_recipe, small_stage, write_recipe

STEPS = 40
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, run_preloaded: Run) -> Callable[..., list[float]]:
    """`losses(name, processes=..., ...)` runs the recipe; the training loss of each step, then the held-out loss."""
    folder = tmp_path_factory.mktemp("any")
    # Three classes: what 40 steps can learn with half of the patches dropped.
    pack(
        "digits",
        folder / "digits",
        classes=("0", "1", "2"),
        holdout=0.1,
        samples_per_shard=200,
        report=lambda text: None,
    )

    def run(name: str, *, processes: int, micro_batch: int, masks: str = "sample", **engine: object) -> list[float]:
        stage = small_stage(
            folder / "digits",
            global_batch_size=32,
            duration=f"{STEPS} steps",
            optimizer={"name": "adamw", "lr": 0.005},
            augment={"mixup_alpha": 0.2, "crop_area": [0.8, 1.0], "flip": 0.0},
            dropout=0.1,
            stochastic_depth=0.2,
            patch_dropout=0.5,
            unmasked_finish="25%",
            dropout_masks=masks,
            log_every="1 steps",
            save_every="100%",
        )
        model = {"width": 32, "depth": 2, "heads": 2, "patch_size": 2}
        engine = {"precision": "fp32", "max_micro_batch_size": micro_batch, **engine}
        tree = small_recipe(name, model=model, seed=7, processes=processes, engine=engine, pretrain_=stage)
        write_recipe(folder / f"{name}.yaml", tree)
        done = run_preloaded("run", f"{name}.yaml", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = read_metrics(folder / "runs" / name / "pretrain" / "metrics.jsonl")
        curve = [row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics]
        assert len(curve) == STEPS
        return [*curve, *(row.metrics["val/loss"] for row in rows if "val/loss" in row.metrics)]

    return run


@pytest.fixture(scope="module")
def alone(losses: Callable[..., list[float]]) -> list[float]:
    return losses("alone", processes=1, micro_batch=32)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("two", {"processes": 2, "micro_batch": 8, "zero_stage": 3, "activation_checkpointing": True}),
        pytest.param("four", {"processes": 4, "micro_batch": 4, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param(
            "accelerated",
            {"processes": 2, "micro_batch": 4, "zero_stage": 0, "backend": "accelerate"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_are_those_of_one_process(
    name: str, how: dict[str, object], losses: Callable[..., list[float]], alone: list[float]
) -> None:
    assert losses(name, **how) == pytest.approx(alone, rel=1e-5)
    assert min(alone) < alone[0] - 0.1, "it does not learn, so the masks would not show"


@pytest.mark.slow
def test_masks_of_the_process_are_others_on_two(losses: Callable[..., list[float]], alone: list[float]) -> None:
    """The option; and the tolerance above is far below what other masks do."""
    by_process = losses("by_process", processes=2, micro_batch=8, masks="process")
    assert max(abs(ours - theirs) for ours, theirs in zip(by_process, alone, strict=True)) > 1e-2
