"""The vocabulary says what the code does: metrics that are logged, state that optimizers keep, exit codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from pipeline import vocabulary
from pipeline.engine.optim import build_optimizer
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.vocabulary import METRICS, OPTIMIZERS, OptimizerName

ROOT = Path(__file__).resolve().parents[2]


def test_every_metric_that_the_code_names_is_in_the_vocabulary_and_no_other() -> None:
    named: set[str] = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        if path.name != "vocabulary.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named.update(re.findall(r"^(?:train|opt|data|perf|val|model)/\w+$", node.value))
    assert named == METRICS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_the_state_that_the_vocabulary_says(name: OptimizerName) -> None:
    model = torch.nn.Linear(7, 3)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1))
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    facts = OPTIMIZERS[name]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        moments = {key: value for key, value in state.items() if value.shape == parameter.shape}
        assert tuple(moments) == facts.moments
        assert sum(value.nbytes for value in moments.values()) == facts.bytes_per_parameter * parameter.numel()


def test_exit_codes_are_different() -> None:
    codes = [value for name, value in vars(vocabulary).items() if name.startswith("EXIT_")]
    assert len(codes) == len(set(codes)) >= 4 and 0 not in codes
