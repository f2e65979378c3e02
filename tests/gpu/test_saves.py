"""State: snapshots beside training, going on from a checkpoint to the last bit, other ZeRO stages."""

import itertools
import threading
from pathlib import Path

import pytest
import torch

from shardvit.pipeline.engine.saved_state.host_copy import HostBuffer, HostCopy
from shardvit.pipeline.engine.saved_state.state_files import StateFile
from shardvit.pipeline.ranks.group import Ranks
from tests.gpu.twenty_steps import ENGINES, STEPS, TOLERANCES, Opened, opened, recipe_for, same_bits, snapshot_copy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
HALF = STEPS // 2
ALL = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_snapshot_is_copied_beside_the_next_steps(engine, ranks: Ranks, device):
    """Three times from the same page-locked buffer, with the steps that would overwrite what it copies."""
    recipe = recipe_for({**ENGINES[engine], "precision": "bf16"}, ema={"decay": 0.9})
    buffer = HostBuffer(device)
    with opened(recipe, ranks=ranks) as training:
        for first in range(0, 9, 3):
            training.run(range(first, first + 3))
            files = training.engine.snapshot()
            expected, found = snapshot_copy(files), list[StateFile]()
            copy = HostCopy(files, buffer=buffer)
            thread = threading.Thread(target=lambda copy=copy, found=found: found.extend(copy.run()))
            thread.start()
            training.engine.hold.set(copy.wait)
            training.run(range(first + 3, first + 5))
            thread.join()
            copied = [tensor for file in found for tensor in file.tensors or ()]
            assert len(copied) > 0 and len(copied) == len(expected) and all(map(bits, copied, expected))
            later = snapshot_copy(training.engine.snapshot())
            assert not all(map(bits, later, expected)), "nothing was overwritten"
    buffer.free()


def bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


WAYS = {
    **ENGINES,
    "ZeRO 1, overlap on": {"overlap": "on", "bucket_elements": 60_000},
    "ZeRO 1, checkpointed": {"activation_checkpointing": True},
    "ZeRO 1, offload": {"offload": "optimizer"},
    "ZeRO 1, compiled": {"compile": "blocks"},
}


@ALL
@pytest.mark.parametrize("way", WAYS)
def test_going_on_from_a_checkpoint_is_the_same_to_the_last_bit(way, precision, ranks: Ranks, device, tmp_path: Path):
    if precision == "fp16" and device.type == "cpu":
        pytest.skip("fp16 is for GPUs")
    recipe = recipe_for({**WAYS[way], "precision": precision}, ema={"decay": 0.9})
    with opened(recipe, ranks=ranks) as training:
        training.run(range(HALF))
        folder = training.write(tmp_path / "state")
        rest, weights = training.run(range(HALF, STEPS)), trained(training)
    with opened(recipe, ranks=ranks) as training:
        training.load(folder, written_by=recipe)
        assert training.run(range(HALF, STEPS)) == rest
        assert all(same_bits(one, other) for one, other in zip(trained(training), weights, strict=True))


def trained(training: Opened) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights = {name: tensor.clone() for name, tensor in training.engine.weights().items()}
    with training.engine.averaged():
        return weights, {name: tensor.clone() for name, tensor in training.engine.weights().items()}


@ALL
@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(range(4), 2)), ids=lambda stage: f"ZeRO {stage}")
def test_another_zero_stage_goes_on(old, new, precision, ranks: Ranks, device, tmp_path: Path, record_property):
    """From the same weights and averages to the last bit, with losses within the precision's tolerance."""
    if precision == "fp16" and device.type == "cpu":
        pytest.skip("fp16 is for GPUs")
    written_by, read_by = (
        recipe_for({"zero_stage": stage, "precision": precision}, ema={"decay": 0.9}) for stage in (old, new)
    )
    with opened(written_by, ranks=ranks) as training:
        first = training.run(range(HALF))[0].loss
        folder, weights = training.write(tmp_path / "state"), trained(training)
        rest = training.run(range(HALF, STEPS))
    with opened(read_by, ranks=ranks) as training:
        training.load(folder, written_by=written_by)
        assert all(same_bits(one, other) for one, other in zip(trained(training), weights, strict=True))
        pairs = zip(training.run(range(HALF, STEPS)), rest, strict=True)
    found = max(abs(one.loss - other.loss) for one, other in pairs) / first
    record_property("difference", f"{found:.1e}, bound {TOLERANCES[precision]:.0e}")
    assert found <= TOLERANCES[precision]
