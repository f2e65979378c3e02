"""Compiled blocks learn what uncompiled ones do; how many graphs there are, and that nothing breaks them."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shardvit.data_shards.errors import UserError
from shardvit.model.layers.dropout import words_of
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model, checkpoint_blocks, set_patch_dropout
from shardvit.pipeline.engine.saved_state.frozen import freeze
from shardvit.pipeline.kernels import compiled_blocks
from shardvit.pipeline.kernels.compiled_blocks import CompiledBlocks, compile_blocks, why_not_compiled
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.stage.dropout_masks import sample_words, step_key
from tests.model.comparing import randomise

# Dynamo looks at it, and hides the warning from what prints it, not from what makes it an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IMAGES, SIZE, DEPTH = 4, 16, 3
RATES = {"dropout": 0.1, "stochastic_depth": 0.3}
Graphs = list[tuple[str, tuple[int, ...]]]


def _recipe(*, model: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **stage: Any) -> Recipe:
    sizes = {"width": 32, "depth": DEPTH, "heads": 2, "patch_size": 4}
    required = {"train": "unused", "eval": "unused", "image_size": SIZE, "global_batch_size": 8, "duration": "3 steps"}
    optimizer = {"optimizer": {"name": "adamw", "lr": 0.01}}
    return Recipe.model_validate(
        {
            "name": "test",
            "model": sizes | (model or {}),
            "engine": {"precision": "fp32", "compile": "blocks"} | (engine or {}),
            "stages": {"pretrain": {**required, **optimizer, **stage}},
        }
    )


def _model(recipe: Recipe) -> Any:
    built = build_model(
        recipe.model,
        image_size=SIZE,
        num_classes=5,
        head="linear",
        regularisation=recipe.train_stage("pretrain").regularisation,
    )
    return randomise(built).train()


def _step(model: Any, step: int, *, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    if words := words_of(model):
        drawn = sample_words(step_key(0, step=step), sites=words.sites, places=torch.arange(IMAGES))
        words.give(drawn, step_word=2**31 + step)
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(step))
    loss = model(images).square().mean()
    loss.backward()
    if optimizer:
        optimizer.step()
    model.zero_grad()
    return loss.detach()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made and run as they are: what inductor makes of them takes a C++ compiler its time."""
    monkeypatch.setattr(compiled_blocks, "_inductor", lambda graph, inputs: graph.forward)
    monkeypatch.setattr(compiled_blocks, "_inductor_works", lambda device: None)
    counters.clear()
    yield
    assert not counters["graph_break"]


def _graphs(compiled: CompiledBlocks) -> Graphs:
    return [(graph.use, graph.shape) for graph in compiled.graphs]


def _aot_eager(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Forward and backward graphs as inductor would get them, run operation by operation."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, list(inputs))


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],  # a C++ compiler takes a minute
)
def test_three_steps_and_an_evaluation_are_those_of_uncompiled_blocks(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, stochastic depth and every second block recomputed. SGD: Adam blows up the rounding of gradients
    that are almost zero."""
    if backend == "aot_eager":
        monkeypatch.setattr(compiled_blocks, "_inductor", _aot_eager)
        monkeypatch.setattr(compiled_blocks, "_inductor_works", lambda device: None)
    recipe = _recipe(**RATES)
    plain, ours = _model(recipe), _model(recipe)
    names, initial = list(ours.state_dict()), {name: weights.clone() for name, weights in ours.state_dict().items()}
    counters.clear()
    with settled_kernels(recipe, stage="pretrain", model=ours, device=CPU) as kernels:
        checkpoint_blocks(ours, every=2)
        losses = [
            [_step(model, step, optimizer=optimizer) for step in range(3)]
            for model in (plain, ours)
            for optimizer in [torch.optim.SGD(model.parameters(), lr=0.03)]
        ]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        with torch.no_grad():
            images = torch.randn(IMAGES, 3, SIZE, SIZE)
            torch.testing.assert_close(ours.eval()(images), plain.eval()(images), rtol=1e-3, atol=1e-4)
    assert kernels.compiled is not None and list(ours.state_dict()) == names
    assert _graphs(kernels.compiled) == [("training", (IMAGES, 17, 32)), ("evaluation", (IMAGES, 17, 32))]
    assert not counters["graph_break"] and kernels.tags == {"shardvit.compile": "blocks", "shardvit.attention": "flash"}
    for name, weights in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weights, rtol=1e-3, atol=2e-5, msg=name)
        assert (weights - initial[name]).abs().max() > 1e-3, f"{name} has not learnt"


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("model", "stage", "lengths"),
    [
        ({}, RATES, (17, 17)),
        ({"pool": "map", "layer_scale": 0.1}, RATES | {"patch_dropout": 0.5}, (8, 16)),
        ({"position": "relative"}, RATES, (17, 17)),
        ({"rope": "axial", "registers": 3, "qk_norm": "per_head", "mlp": "swiglu"}, RATES, (20, 20)),
        ({"rope": "mixed", "norm": "rms", "mlp": "swiglu_norm", "position": "none"}, RATES, (17, 17)),
        ({"registers": 3, "pool": "map"}, RATES | {"patch_dropout": 0.5}, (11, 19)),
        ({"position": "learned_2d", "position_at": "every_layer"}, {}, (17, 17)),
        ({"pool": "gap", "position": "sincos_2d", "resnet_layers": [1], "width": 64}, RATES, (16, 16)),
    ],
    ids=str,
)
def test_one_graph_for_all_blocks_of_a_length_and_use(
    model: dict[str, Any], stage: dict[str, Any], lengths: tuple[int, int]
) -> None:
    recipe = _recipe(model=model, **stage)
    ours, plain = _model(recipe), _model(recipe)
    told: list[str] = []
    compiled = compile_blocks(ours, device=CPU)
    compiled.tell = told.append
    width = recipe.model.sizes.width
    for step in range(2):
        torch.testing.assert_close(_step(ours, step), _step(plain, step))
    expected: Graphs = [("training", (IMAGES, lengths[0], width))]
    assert _graphs(compiled) == expected
    if "patch_dropout" in stage:
        for each in (ours, plain):
            set_patch_dropout(each, 0.0)
        checkpoint_blocks(ours, every=1)
        torch.testing.assert_close(_step(ours, 2), _step(plain, 2))
        expected.append(("training", (IMAGES, lengths[1], width)))
    with torch.no_grad():
        images = torch.randn(IMAGES, 3, SIZE, SIZE)
        torch.testing.assert_close(ours.eval()(images), plain.eval()(images))
        ours(images)
    expected.append(("evaluation", (IMAGES, lengths[1], width)))
    assert _graphs(compiled) == expected
    assert len(told) == len(expected) and not any("warning" in line for line in told)


@pytest.mark.usefixtures("traced")
def test_masked_patches_share_a_graph_too() -> None:
    recipe = _recipe(**RATES)
    by = recipe.train_stage("pretrain").regularisation
    model = randomise(build_masked_patch(recipe.model, image_size=SIZE, regularisation=by)).train()
    compiled = compile_blocks(model, device=CPU)
    words = words_of(model)
    assert words is not None
    words.give(sample_words(0, sites=words.sites, places=torch.arange(2)), step_word=1)
    model(torch.randn(2, 3, SIZE, SIZE), torch.arange(16).repeat(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    assert _graphs(compiled) == [("training", (2, 17, 32))]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("frozen", "kinds"), [(("trunk",), 1), (("blocks.0.*",), 2), (("patch_embedding",), 1), ((), 1)]
)
def test_what_is_frozen_needs_graphs_of_its_own_without_a_warning(frozen: tuple[str, ...], kinds: int) -> None:
    model, told = _model(_recipe()), list[str]()
    compiled = compile_blocks(model, device=CPU)
    compiled.tell = told.append
    freeze(model, frozen, key="frozen")
    _step(model, 0)
    assert len(compiled.graphs) == kinds and not any("warning" in line for line in told)


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0) and torch.__version__.startswith("2.11."),
    reason="torch 2.11 does not see changed numbers of modules on Python 3.13.0",
)
@pytest.mark.usefixtures("traced")
def test_what_is_compiled_again_is_a_warning_with_its_reason() -> None:
    model, told = _model(_recipe(dropout=0.1)), list[str]()
    compiled = compile_blocks(model, device=CPU)
    compiled.tell = told.append
    _step(model, 0)
    model.get_submodule("blocks.1.mlp.drop1").p = 0.2  # a number that is part of the graph
    _step(model, 1)
    assert [(graph.use, bool(graph.reason)) for graph in compiled.graphs] == [("training", False), ("training", True)]
    (warning,) = (line for line in told if "warning" in line)
    assert "training" in warning and ".p" in warning and compiled.graphs[1].reason in warning


@pytest.mark.usefixtures("traced")
def test_a_break_is_an_error() -> None:
    model = _model(_recipe())
    block = model.get_submodule("blocks.1")

    class Looking(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(input)

    block.norm2.__class__ = Looking
    compile_blocks(model, device=CPU)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        _step(model, 0)
    counters.clear()


def test_a_machine_that_cannot_compile_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(compiled_blocks, "_inductor_works", broken)
    recipe = _recipe()
    opened: Callable[[], Any] = lambda: settled_kernels(recipe, stage="pretrain", model=_model(recipe), device=CPU)  # noqa: E731
    with pytest.raises(UserError, match=r"engine\.compile: .*\(no compiler\).* off"), opened():
        pass


@pytest.mark.parametrize(
    ("engine", "stage", "device", "compiles"),
    [
        ({}, RATES, GPU, True),
        ({"zero_stage": 0}, {}, GPU, True),
        ({"zero_stage": 2}, {"patch_dropout": 0.5, "dropout_masks": "process"}, GPU, True),
        ({"backend": "accelerate"}, {}, GPU, True),
        ({}, {}, CPU, False),
        ({"zero_stage": 3}, {}, GPU, False),
        ({}, RATES | {"dropout_masks": "process"}, GPU, False),
        ({}, {"model": {"variant": "R50x1"}, "image_size": 32}, GPU, False),
    ],
)
def test_auto(engine: dict[str, Any], stage: dict[str, Any], device: torch.device, compiles: bool) -> None:
    stage = dict(stage)
    model = stage.pop("model", None)
    recipe = _recipe(engine=engine | {"compile": "auto"}, **stage)
    if model:
        recipe = recipe.model_copy(update={"model": type(recipe.model).model_validate(model)})
    assert (why_not_compiled(recipe, recipe.train_stage("pretrain"), device=device) == "") == compiles
