"""Waiting for a unit's weights happens before each of its calls, outside of its graph; two processes: `distributed`."""

import torch
from torch import nn

from shardvit.pipeline.engine.sharded_step import _before_calls


def test_a_compiled_modules_action_runs_before_each_call_and_does_not_break_its_graph() -> None:
    module, compiled = nn.Linear(3, 3), nn.Linear(3, 3)
    compiled.load_state_dict(module.state_dict())
    compiled.compile(backend="eager", fullgraph=True)
    for each in (module, compiled):
        calls: list[int] = []
        undo = _before_calls(each, lambda calls=calls: calls.append(len(calls)))
        x = torch.randn(2, 3)
        assert torch.equal(each(x), nn.functional.linear(x, module.weight, module.bias))
        each(x)
        assert calls == [0, 1]
        undo()
        each(x)
        assert calls == [0, 1]
