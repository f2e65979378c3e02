"""What engines write comes back as it was; what would run code, or pose as a record, is refused by name."""

from pathlib import Path

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine.saved_state.portable import open_state
from shardvit.pipeline.engine.saved_state.reading import Record, read_state
from tests.launch.security.somebody import Canary


def written(path: Path, **content: object) -> Path:
    torch.save(content, path)
    return path


def test_everything_that_deepspeed_writes_is_read_without_it(tmp_path: Path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    dynamic = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False)
    dynamic.cur_iter = 7
    content = {
        "tensors": [torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16)],
        "shapes": torch.Size([2, 3]),
        "stages": list(ZeroStageEnum),
        "scalers": [LossScaler(4.0), dynamic],
        "fragments": {"a": fragment_address(start=1, numel=2)},
    }
    for how in ("map", "copy"):
        found = read_state(written(tmp_path / "x.pt", **content), how=how)
        assert all(map(torch.equal, found["tensors"], content["tensors"]))
        assert found["shapes"] == content["shapes"] and found["stages"] == [0, 1, 2, 3]
        for record, scaler in zip(found["scalers"], content["scalers"], strict=True):
            assert isinstance(record, Record) and vars(record) == vars(scaler)
        assert vars(found["fragments"]["a"]) == {"start": 1, "numel": 2}


def test_a_record_with_more_than_plain_values_is_refused(tmp_path: Path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    scaler = LossScaler(1.0)
    scaler.update_scale = torch._utils._rebuild_tensor_v2  # allowed by torch, and would be called
    with pytest.raises(UserError, match=r"x\.pt holds more than tensors"):
        read_state(written(tmp_path / "x.pt", scaler=scaler))


@pytest.mark.parametrize("content", [b"", b"unreadable", b"\x80\x02.", b"PK\x03\x04"])
def test_what_is_no_file_of_torch_is_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    for how in ("map", "copy"):
        with pytest.raises(UserError, match=r"x\.pt ") as caught:
            read_state(path, how=how)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("backend", "file"), [("accelerate", "accelerate.pt"), ("deepspeed", "ddp.pt")])
def test_what_keeps_everything_whole_goes_on_from_no_pickle(tmp_path: Path, backend: str, file: str):
    model = torch.nn.Linear(2, 1)
    written(tmp_path / file, model=model.state_dict(), optimizer=Canary(tmp_path / "ran"), scaler=None)
    with pytest.raises(UserError, match=rf"{file} holds more"):
        open_state(tmp_path, written={"backend": backend, "zero_stage": 0, "processes": 1}, model=model)
    assert not (tmp_path / "ran").exists()
