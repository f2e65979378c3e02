"""An optimizer of the user's own: it steps the same groups, and what is none is named."""

from pathlib import Path

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from tests.own_training import write_example

KEYS = {"lr": 0.1, "weight_decay": 0.05, "head_lr_factor": 2.0}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.ModuleDict({"trunk": torch.nn.Linear(6, 5), "head": torch.nn.Linear(5, 2)})


def stepped(config: OptimizerConfig) -> list[torch.Tensor]:
    """The weights after two steps."""
    net = model()
    optimizer = build_optimizer(net, config)
    for _ in range(2):
        net["head"](net["trunk"](torch.ones(3, 6))).square().sum().backward()  # pyright: ignore[reportIndexIssue]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * group["lr_scale"]
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in net.parameters()]


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(f"import torch\n\ndef mine(groups, lr):\n    return {text}\n")
    return f"{folder / 'mine.py'}:mine"


def test_one_that_is_the_built_in_one_gives_the_same_bits(tmp_path: Path):
    code = written(tmp_path, "torch.optim.AdamW(groups, lr=lr, fused=True)")
    own, ours = (
        stepped(OptimizerConfig(name="custom", custom=code, **KEYS)),
        stepped(OptimizerConfig(name="adamw", **KEYS)),
    )
    assert all(torch.equal(a, b) for a, b in zip(own, ours, strict=True))
    (tmp_path / "page").mkdir()  # a file is loaded once
    other = stepped(OptimizerConfig.model_validate({"custom": f"{write_example(tmp_path / 'page')}:nadam", **KEYS}))
    assert not any(torch.equal(a, b) for a, b in zip(other, ours, strict=True))


@pytest.mark.parametrize("returns", ["groups", "torch.optim.SGD(groups[:1], lr=lr)", "None"])
def test_what_is_no_optimizer_of_all_groups_is_refused(tmp_path: Path, returns: str):
    code = written(tmp_path, returns)
    with pytest.raises(UserError, match=r"optimizer\.custom .*mine: it must return a torch\.optim\.Optimizer"):
        build_optimizer(model(), OptimizerConfig(name="custom", custom=code, **KEYS))
