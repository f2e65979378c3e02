"""Compile Transformer blocks in place with torch.compile; names, state dict and gradient hooks stay.

Blocks of one shape share a graph: one for training, one for evaluation, and one more for training if patch dropout ends
before the stage, and for each smaller size of images that grow. Each is reported when compiled; any other brings a
warning with torch's reason. A block that does not fit one graph is an error. A graph costs seconds to a minute, once
(`cache`). Inductor's deterministic mode chooses no kernel by timing, so that a resumed run repeats the same bits;
rounding differs from uncompiled blocks. Patch embedding, last norm, pooling and head are not compiled.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardvit.data_shards.errors import UserError
from shardvit.model.self_supervised.masked_autoencoder import MaskedAutoencoderVit
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.train_stage import TrainStage

_MOST_GRAPHS = 64  # torch's limit of 8 also counts graphs of frozen and other parts
_BEFORE_BLOCKS = ("patch_embed.", "pos_embed", "cls_token", "reg_token", "dist_token", "mask_token", "position.")
_WORKERS = 4  # compiler processes of a rank with a GPU; torch's default is one per core in every rank


@dataclass(frozen=True)
class BlockGraph:
    """One compiled graph."""

    use: Literal["training", "evaluation"]
    shape: tuple[int, ...]  # of the tokens, [n, T, D]
    seconds: float
    reason: str  # why torch did not reuse an earlier one; "": it is the first


@dataclass
class CompiledBlocks:
    """torch.compile backend for one model's blocks: inductor, plus a record of what it compiled."""

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
        """Count the graphs needed: one for each pattern of frozen parameters, in and before a block."""
        named = self.model.named_parameters()
        trained_before = any(each.requires_grad for name, each in named if name.startswith(_BEFORE_BLOCKS))
        kinds = set[tuple[bool, ...]]()
        for block in transformer_blocks(self.model):
            trained = tuple(parameter.requires_grad for parameter in block.parameters())
            kinds.add((trained_before, *trained))
            trained_before = trained_before or any(trained)
        return len(kinds)


def why_not_compiled(recipe: Recipe, config: TrainStage, *, device: torch.device) -> str:
    """Say why `auto` does not compile this stage's blocks; "": it does."""
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
    """Compile the model's blocks in place, before an engine wraps it. UserError if torch.compile does not work here."""
    import torch._inductor.config as inductor

    torch.compiler.reset()  # forget an earlier stage's graphs
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.optimize_ddp = False  # under ZeRO 0 it would split blocks larger than DDP's buckets
    inductor.compile_threads = _WORKERS if device.type == "cuda" else 1
    try:
        _inductor_works(device)
    except Exception as error:  # a missing compiler can raise anything
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
    """List the Transformer blocks, a decoder's last, without a hybrid's ResNet units."""
    found = list(model.get_submodule("blocks").children())
    if isinstance(model, MaskedAutoencoderVit):
        found += model.decoder.blocks.children()
    return found


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
    """Hide the advice that `settle` gives in the recipe's terms (`engine.fp32_matmul`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        yield


def _reason() -> str:
    """Return torch's reason for the current recompilation; torch has no public API for it."""
    from torch._dynamo.utils import get_metrics_context

    metrics: dict[str, Any] = getattr(get_metrics_context(), "_metrics", {})
    return str(metrics.get("recompile_reason") or "")
