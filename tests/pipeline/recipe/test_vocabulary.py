"""The vocabulary says what the code does: metrics that are logged, state that optimizers keep, exit codes."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.recipe import vocabulary
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.vocabulary import METRICS, OPTIMIZERS, MomentType, OptimizerName

ROOT = Path(__file__).resolve().parents[3]


def test_every_metric_that_the_code_names_is_in_the_vocabulary_and_no_other() -> None:
    named: set[str] = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        if path.name != "vocabulary.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named.update(re.findall(r"^(?:train|opt|data|perf|val|model)/\w+$", node.value))
    patterns = {name for name in METRICS if re.search("[A-Z]", name)}  # in capitals what the user names
    composed = {"val/ema_balanced_accuracy"}  # of a key and "balanced_accuracy", where results are shown
    assert named | composed == METRICS.keys() - patterns


@pytest.mark.parametrize("first_moment", get_args(MomentType))
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "custom"])  # its state is unknown
def test_an_optimizer_keeps_the_state_that_the_vocabulary_says(name: OptimizerName, first_moment: MomentType) -> None:
    facts = OPTIMIZERS[name]
    if first_moment == "bf16" and not facts.rounded:
        with pytest.raises(ValidationError, match="first_moment"):
            OptimizerConfig(name=name, lr=0.1, first_moment=first_moment)
        return
    model = torch.nn.Linear(64, 48)
    config = OptimizerConfig(name=name, lr=0.1, first_moment=first_moment)
    optimizer = build_optimizer(model, config)
    model(torch.randn(2, 64)).square().sum().backward()
    optimizer.step()
    kernel = optimizer.state[model.weight]
    for moment in facts.moments:
        assert kernel[moment].shape == model.weight.shape
        rounded = moment == facts.rounded and first_moment == "bf16"
        assert kernel[moment].dtype == (torch.bfloat16 if rounded else torch.float32)
    kept = [
        it for state in optimizer.state.values() for it in state.values() if isinstance(it, torch.Tensor) and it.ndim
    ]
    share = sum(it.nbytes for it in kept) / sum(parameter.numel() for parameter in model.parameters())
    assert share <= config.bytes_per_parameter, "the memory plan promises less than it takes"
    exact = share if not facts.more_bytes else config.bytes_per_parameter
    assert config.bytes_per_parameter == exact


def test_exit_codes_are_different() -> None:
    codes = [value for name, value in vars(vocabulary).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes)) >= 4 and 0 not in codes
