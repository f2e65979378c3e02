"""Shards are put together by address, whatever they were cut into; and a dynamic loss scale is carried over.

The shards are cut here anew, after DeepSpeed's description: flat groups in equal pieces (ZeRO 1 and 2), parameters in
equal pieces (ZeRO 3). tests/distributed/test_elastic.py reads DeepSpeed's own.
"""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm.optim
import torch
from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine.saved_state.masters import put_loss_scale
from shardvit.pipeline.engine.saved_state.portable import WEIGHT, LossScale, open_deepspeed, open_state, open_whole

MOMENTS = ("exp_avg", "exp_avg_sq")
CUTS = [(stage, processes, align) for stage in (1, 3) for processes in (1, 2, 3, 7, 64) for align in (1, 4)]


def model_of(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def content_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: {of: torch.randn(p.shape, generator=generator) for of in (WEIGHT, *MOMENTS)}
        for name, p in model.named_parameters()
    }


GROUPS = [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]


def cut(folder: Path, content: dict, *, stage: int, processes: int, align: int = 1, loss_scaler: object = None) -> Path:
    """Write the shards of a state."""
    folder = folder / "step-00000007" / "deepspeed"
    folder.mkdir(parents=True)
    cutter = _pieces_3 if stage == 3 else _pieces_1_2
    shards = [{of: [] for of in (WEIGHT, *MOMENTS)} for _ in range(processes)]
    lost, paddings = [[] for _ in range(processes)], []
    for group in GROUPS:
        padding = [-content[name][WEIGHT].numel() % align for name in group[:-1]] + [0]
        paddings.append(padding)
        for of in (WEIGHT, *MOMENTS):
            flats = [content[name][of].flatten() for name in group]
            for rank, (piece, unused) in enumerate(cutter(flats, padding=padding, processes=processes)):
                # What DeepSpeed adds at the end is there in the moments, but not in the weights.
                shards[rank][of].append(piece[: piece.numel() - unused] if of == WEIGHT and stage != 3 else piece)
                if of == WEIGHT:
                    lost[rank].append(unused)
    flat_key, state_key = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    for rank, shard in enumerate(shards):
        state = {
            number: {"step": torch.tensor(3.0), **{moment: shard[moment][number] for moment in MOMENTS}}
            for number in range(len(GROUPS))
        }
        optimizer = {
            flat_key: shard[WEIGHT],
            state_key: {"state": state, "param_groups": []},
            "group_paddings": lost[rank],
            "param_alignment_paddings": paddings,
            "loss_scaler": loss_scaler or static_scaler(),
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [{name: content[name][WEIGHT].shape for name in group} for group in GROUPS],
        "global_steps": 5,
        "global_samples": 60,
        "skipped_steps": 2,
    }
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    torch.save(model, folder / f"{name}_model_states.pt")
    return folder


def _pieces_1_2(flats, *, padding, processes):
    whole = torch.cat([torch.cat([flat, torch.zeros(pad)]) for flat, pad in zip(flats, padding, strict=True)])
    full = torch.cat([whole, torch.zeros(-whole.numel() % (2 * processes))])
    size = full.numel() // processes
    for rank in range(processes):
        yield full[rank * size :][:size].clone(), min(size, max(0, (rank + 1) * size - whole.numel()))


def _pieces_3(flats, *, padding, processes):
    full = [torch.cat([flat, torch.zeros(-flat.numel() % processes)]).view(processes, -1) for flat in flats]
    for rank in range(processes):
        yield torch.cat([parts[rank] for parts in full]), 0


@pytest.mark.parametrize(("stage", "processes", "align"), CUTS)
def test_any_part_of_any_parameter_is_found_however_the_state_was_cut(
    tmp_path: Path, stage: int, processes: int, align: int
):
    model = model_of()
    content = content_of(model)
    folder = cut(tmp_path, content, stage=stage, processes=processes, align=align)
    saved = open_deepspeed(folder, zero_stage=stage, processes=processes, model=model.to("meta"))
    assert saved.shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert saved.moments == dict.fromkeys(MOMENTS, torch.float32)
    assert saved.optimizer_step == 3 and saved.loss_scale is None
    counters = (saved.global_steps, saved.global_samples, saved.skipped_steps)
    assert counters == (5, 60, 2)
    dice = random.Random(4)
    for name, tensors in content.items():
        for of, tensor in tensors.items():
            assert torch.equal(saved.whole(name, of=of), tensor)
            for _ in range(10):
                first = dice.randrange(tensor.numel())
                count = dice.randint(1, tensor.numel() - first)
                part = saved.part(name, of=of, first=first, count=count)
                assert torch.equal(part, tensor.flatten()[first : first + count])


@pytest.mark.parametrize("stage", [1, 3])
def test_only_the_shards_that_hold_some_of_a_part_are_opened(tmp_path: Path, stage: int):
    model = model_of()
    content = content_of(model)
    folder = cut(tmp_path, content, stage=stage, processes=4)
    for rank in (1, 2, 3):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"unreadable")
    saved = open_deepspeed(folder, zero_stage=stage, processes=4, model=model)
    part = saved.part("0.weight", of="exp_avg", first=0, count=5)
    assert torch.equal(part, content["0.weight"]["exp_avg"].flatten()[:5])
    with pytest.raises(Exception, match=r"unpickling|magic|zip|mmap"):
        saved.whole("0.weight")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_a_model_lacks_may_be_left(tmp_path: Path, stage: int):
    content = content_of(model_of())
    folder = cut(tmp_path, content, stage=stage, processes=2).parent
    written = {"backend": "deepspeed", "zero_stage": stage, "processes": 2}
    saved = open_state(folder, written=written, model=nn.Sequential(*list(model_of())[:2]), besides="2")
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(saved.whole(name), content[name][WEIGHT])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (model_of(width=6), r"recipe says: 0\.weight is \[7, 5\] instead of \[7, 6\]"),
        (nn.Sequential(*list(model_of())[:2]), r"recipe says: it has 2\.bias, 2\.weight besides"),
        (nn.Sequential(*model_of(), nn.LayerNorm(1), nn.Linear(1, 1)), r"lacks 3\.bias, 3\.weight, 4\.bias and 1 more"),
    ],
    ids=["reshaped", "too much", "too little"],
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_of_another_model_is_refused(tmp_path: Path, stage: int, model: nn.Module, said: str):
    if stage:
        folder = cut(tmp_path, content_of(model_of()), stage=stage, processes=2).parent
    else:
        folder = tmp_path / "step-00000007"
        folder.mkdir(parents=True)
        ours = model_of()
        content = {
            "model": ours.state_dict(),
            "optimizer": torch.optim.AdamW(ours.named_parameters()).state_dict(),
            "scaler": None,
        }
        torch.save(content, folder / "ddp.pt")
    with pytest.raises(UserError, match=said) as caught:
        open_state(folder, written={"backend": "deepspeed", "zero_stage": stage, "processes": 2}, model=model)
    assert f"checkpoint {folder} is of another model" in str(caught.value) and "\n" not in str(caught.value)


def test_a_state_of_deepspeeds_stage_0_which_earlier_versions_wrote_is_refused(tmp_path: Path):
    (tmp_path / "deepspeed").mkdir()
    with pytest.raises(UserError, match="was written by an earlier shardvit") as caught:
        open_state(tmp_path, written={"backend": "deepspeed", "zero_stage": 0, "processes": 2}, model=model_of())
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_shards_of_another_number_of_processes_are_refused(tmp_path: Path):
    folder = cut(tmp_path, content_of(model_of()), stage=1, processes=2)
    with pytest.raises(UserError, match="has the shards of 2 processes instead of 3"):
        open_deepspeed(folder, zero_stage=1, processes=3, model=model_of())


def test_a_file_with_everything_whole_is_read_too(tmp_path: Path):
    model = model_of()
    groups = [[(name, dict(model.named_parameters())[name]) for name in group] for group in GROUPS]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None}
    torch.save(state, tmp_path / "accelerate.pt")
    saved = open_whole(tmp_path / "accelerate.pt", model=model_of())
    assert saved.optimizer_step == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(saved.whole(name), parameter)
        for moment in MOMENTS:
            assert torch.equal(saved.whole(name, of=moment), optimizer.state[parameter][moment])


def test_a_state_that_lacks_some_moments_is_refused(tmp_path: Path):
    model = model_of()
    model[2].bias.grad, model[0].weight.grad = torch.ones(1), torch.ones(7, 5)
    optimizer = torch.optim.AdamW([(name, dict(model.named_parameters())[name]) for group in GROUPS for name in group])
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None}
    torch.save(state, tmp_path / "accelerate.pt")
    with pytest.raises(UserError, match=r"holds no exp_avg of 2\.weight, 0\.bias, 1\.weight and 1 more: take an older"):
        open_whole(tmp_path / "accelerate.pt", model=model_of())


def test_before_the_first_step_there_are_no_moments(tmp_path: Path):
    model = model_of()
    state = {"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.named_parameters()).state_dict()}
    torch.save({**state, "scaler": None}, tmp_path / "accelerate.pt")
    saved = open_whole(tmp_path / "accelerate.pt", model=model_of())
    assert saved.moments == {} and saved.optimizer_step is None


def test_steps_that_timms_lamb_counted_in_its_groups_are_read(tmp_path: Path):
    """Of earlier checkpoints; now that state is read name by name, for any ZeRO stage."""
    model = model_of()
    optimizer = timm.optim.Lamb([{"params": list(model.named_parameters())}])
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None}
    torch.save(state, tmp_path / "ddp.pt")
    saved = open_whole(tmp_path / "ddp.pt", model=model_of())
    assert saved.optimizer_step == 3.0
    assert saved.moments_of("0.weight") == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def static_scaler():
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    return LossScaler(scale=1.0)


def dynamic_scaler(**numbers):
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    scaler = CreateLossScaler(
        torch.half,
        static_loss_scale=1.0,
        dynamic_scaling=True,
        dynamic_loss_args={
            "init_scale": 2**16,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
        },
    )
    vars(scaler).update(numbers)
    return scaler


NUMBERS = {"cur_scale": 512.0, "cur_iter": 4321, "last_overflow_iter": 3000}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_dynamic_loss_scale_goes_on_in_another_stage(tmp_path: Path, stage: int):
    """Read as DeepSpeed pickles it; fp16 itself needs a GPU."""
    scaler = dynamic_scaler(**NUMBERS, cur_hysteresis=1)
    folder = cut(tmp_path, content_of(model_of()), stage=stage, processes=2, loss_scaler=scaler)
    saved = open_deepspeed(folder, zero_stage=stage, processes=2, model=model_of()).loss_scale
    assert saved == LossScale(scale=512.0, iteration=4321, last_overflow=3000, hysteresis=1)
    sharded = SimpleNamespace(loss_scaler=dynamic_scaler())
    put_loss_scale(sharded, saved)
    assert vars(sharded.loss_scaler) == vars(scaler)


def test_a_dynamic_loss_scale_of_zero_0_goes_on_in_another_stage(tmp_path: Path):
    """torch's GradScaler, which ZeRO 0 uses, counts the steps since the last overflow."""
    model = model_of()
    state = {
        "model": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.named_parameters()).state_dict(),
        "scaler": {**torch.amp.GradScaler("cpu").state_dict(), "scale": 512.0, "_growth_tracker": 321},
    }
    torch.save(state, tmp_path / "ddp.pt")
    saved = open_whole(tmp_path / "ddp.pt", model=model_of()).loss_scale
    sharded = SimpleNamespace(loss_scaler=dynamic_scaler(cur_hysteresis=1))
    assert saved is not None
    put_loss_scale(sharded, saved)
    for _ in range(1000 - 321):
        sharded.loss_scaler.update_scale(overflow=False)
        assert sharded.loss_scaler.cur_scale == 512.0
    sharded.loss_scaler.update_scale(overflow=False)
    assert sharded.loss_scaler.cur_scale == 1024.0
