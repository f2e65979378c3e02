"""Compile Transformer blocks in place by torch.compile; names, state dict and gradient hooks stay.

All blocks of one shape share one graph, so 24 blocks compile as fast as one. There is a graph for training, one for
evaluation, and one more for training where patch dropout ends before the stage does. Each is told when it is compiled;
a further one is a warning with torch's reason. A block that cannot be one graph is an error, never a break.

Costs seconds to a minute for each graph, once (`cache`). Inductor's deterministic mode chooses kernels without timing
them, because a resumed run must repeat the same bits. Rounding differs from uncompiled blocks. Patch embedding, last
norm, pooling and head are not compiled.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from data_shards.errors import UserError
from pipeline.recipe.schema import Recipe
from pipeline.recipe.stage import TrainStage

_MOST_GRAPHS = 64  # torch's own limit, 8, counts the graphs of frozen and other parts too
_BEFORE_BLOCKS = ("patch_embed.", "pos_embed", "cls_token", "mask_token", "position.")
_WORKERS = 4  # processes of a rank that compile for a GPU; torch's default is one for each core, in every rank


@dataclass(frozen=True)
class BlockGraph:
    """One graph that was compiled."""

    use: Literal["training", "evaluation"]
    shape: tuple[int, ...]  # of the tokens, [n, T, D]
    seconds: float
    reason: str  # why torch did not take an earlier one; "": it is the first


@dataclass
class CompiledBlocks:
    """torch.compile's backend for the blocks of one model: inductor, and a list of what it was asked for."""

    model: nn.Module
    tell: Callable[[str], None] = lambda line: None
    graphs: list[BlockGraph] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        compiled: Any = _inductor(graph, inputs)
        new = BlockGraph(
            use="training" if torch.is_grad_enabled() else "evaluation",
            shape=next(tuple(it.shape) for it in inputs if isinstance(it, Tensor) and it.dim() == 3),
            seconds=time.perf_counter() - started,
            reason=_reason(),
        )
        known = sum((each.use, each.shape) == (new.use, new.shape) for each in self.graphs)
        self.graphs.append(new)
        self.tell(
            f"compiled: the blocks' graph {len(self.graphs)}, {new.use}, {new.shape[1]} tokens of {new.shape[0]} "
            f"images, in {new.seconds:.1f} s"
        )
        if known >= self._kinds:
            self.tell(
                f"warning: the blocks were compiled again for {new.use} with {new.shape[1]} tokens, which takes time "
                f"and should not happen: {new.reason}; engine.compile: off is the way around"
            )
        return compiled

    @property
    def _kinds(self) -> int:
        """Blocks that differ in what is frozen, in them or before them, need graphs of their own."""
        named = self.model.named_parameters()
        trained_before = any(each.requires_grad for name, each in named if name.startswith(_BEFORE_BLOCKS))
        kinds = set[tuple[bool, ...]]()
        for block in transformer_blocks(self.model):
            trained = tuple(parameter.requires_grad for parameter in block.parameters())
            kinds.add((trained_before, *trained))
            trained_before = trained_before or any(trained)
        return len(kinds)


def why_not_compiled(recipe: Recipe, config: TrainStage, *, device: torch.device) -> str:
    """Why `auto` leaves this stage's blocks as they are; "": it compiles them."""
    if recipe.model.kind == "resnet":
        return "a pure ResNet has no Transformer blocks"
    if device.type != "cuda":
        return "auto compiles on GPUs alone"
    if recipe.engine.zero_stage == 3:
        return "ZeRO 3 gathers weights inside the blocks"
    if config.draws_in_blocks:
        return "dropout_masks: process draws inside the blocks"
    return ""


def compile_blocks(model: nn.Module, *, device: torch.device) -> CompiledBlocks:
    """Compile the model's blocks in place, before an engine wraps it. UserError: compiling fails here."""
    import torch._inductor.config as inductor

    torch.compiler.reset()  # an earlier stage's graphs count no more
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.optimize_ddp = False  # under ZeRO 0 it would cut blocks that are larger than DDP's buckets
    inductor.compile_threads = _WORKERS if device.type == "cuda" else 1
    try:
        _inductor_works(device)
    except Exception as error:  # whatever a compiler's absence turns into
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"engine.compile: torch.compile does not work on this machine ({first}): install a C++ compiler, or set "
            "engine.compile: off"
        ) from error
    compiled = CompiledBlocks(model)
    for block in transformer_blocks(model):
        block.compile(fullgraph=True, dynamic=False, backend=compiled)
    return compiled


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The Transformer's blocks, without the units of a ResNet."""
    return list(model.get_submodule("blocks").children())


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    import torch._inductor

    with _without_advice_on_tf32():
        return torch._inductor.compile(graph, list(inputs), options={"deterministic": True})


def _inductor_works(device: torch.device) -> None:
    number = torch.ones(8, device=device)
    with _without_advice_on_tf32():
        torch.compile(lambda x: x * 2 + 1, fullgraph=True, dynamic=False)(number)


@contextlib.contextmanager
def _without_advice_on_tf32() -> Iterator[None]:
    """`settle` gives it in the recipe's words (`engine.fp32_matmul`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield


def _reason() -> str:
    """torch's reason for compiling again, of the compilation that is under way; torch has no public name for it."""
    from torch._dynamo.utils import get_metrics_context

    metrics: dict[str, Any] = getattr(get_metrics_context(), "_metrics", {})
    return str(metrics.get("recompile_reason") or "")
