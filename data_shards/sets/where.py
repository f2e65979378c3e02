"""Choose samples of a set by an expression over its statistics, such as `width >= 128 and not duplicate`.

pandas evaluates it, a row group at a time, on the columns that it names: a byte a sample in memory beside that. It may
compare, calculate and combine columns and constants; nothing else gets as far as pandas, so nothing can be called.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets.statistics import read_facts
from shardvit.data_shards.store.ranges import RangedFile
from shardvit.data_shards.text import brief

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COMPUTED: Mapping[str, tuple[str, ...]] = {  # and what of
    "aspect": ("width", "height"),
    "pixels": ("width", "height"),
    "class_name": ("labels",),
}
_UNNAMED = ("shard", "row", "labels")  # columns that say nothing by themselves
_MOST_CHARACTERS, _MOST_NODES = 10_000, 1_000
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Invert, ast.USub, ast.UAdd),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple),
)


def names_in(text: str, *, columns: Sequence[str]) -> list[str]:
    """Return the names in an expression over a table's columns.

    UserError for anything but comparisons, arithmetic and constants.
    """
    known = [name for name in (*columns, *_COMPUTED) if name not in _UNNAMED]
    said = f"--where: {brief(text)}"
    try:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError
        tree = ast.parse(text.strip(), mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise UserError(f"{said}: is no expression; write one such as width >= 128 and not duplicate") from None
    nodes = list(ast.walk(tree))
    names = sorted({node.id for node in nodes if isinstance(node, ast.Name)})
    for name in names:
        if name not in known:
            raise UserError(f"{said}: there is no column {name!r}; there are {', '.join(known)}")
    for node in nodes:
        is_odd = isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str)
        if not isinstance(node, _NODES) or is_odd or _is_of_no_list(node) or len(nodes) > _MOST_NODES:
            raise UserError(
                f"{said}: only comparisons, arithmetic, and, or, not, and `in [...]` of constants and of these columns "
                f"are evaluated: {', '.join(known)}"
            )
    if not names:
        raise UserError(f"{said}: it names no column; there are {', '.join(known)}")
    return names


def _is_of_no_list(node: ast.AST) -> bool:
    """True for `in` a column or a text, which pandas takes for something else."""
    return isinstance(node, ast.Compare) and any(
        isinstance(op, ast.In | ast.NotIn) and not isinstance(right, ast.List | ast.Tuple)
        for op, right in zip(node.ops, node.comparators, strict=True)
    )


def rows_where(text: str, table: Path | RangedFile, *, name: str) -> dict[str, NDArray[np.bool_]]:
    """Evaluate an expression over a set's `statistics.parquet`, a path or a readable file; `name` is for messages.

    Returns what it says of each sample of each shard, {file: [samples]}. UserError for another table, or an expression
    that is neither true nor false.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    said: list[NDArray[np.bool_]] = []
    try:
        with pq.ParquetFile(table) as file:
            facts = read_facts(file.schema_arrow.metadata)
            counts = np.zeros(len(facts["shards"]), np.int64)
            names = names_in(text, columns=file.schema_arrow.names)
            wanted = {column for each in names for column in _COMPUTED.get(each, (each,))}
            for batch in file.iter_batches(columns=["shard", *sorted(wanted)]):
                said.append(_evaluate(text, names, batch, classes=facts["classes"]))
                counts += np.bincount(batch.column("shard").to_numpy(), minlength=len(counts))
    except UserError:
        raise
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise UserError(
            f"{name}: cannot be read ({error}); shardvit check --decode --statistics writes it again"
        ) from None
    parts = np.split(np.concatenate([np.zeros(0, np.bool_), *said]), np.cumsum(counts)[:-1])
    return dict(zip(facts["shards"], parts, strict=True))


def _evaluate(text: str, names: Sequence[str], batch: Any, *, classes: Sequence[str]) -> NDArray[np.bool_]:
    import numpy as np

    frame = batch.to_pandas()
    frame = frame.astype(dict.fromkeys(frame.select_dtypes("int32"), np.int64))  # else width * height may overflow
    if "class_name" in names:
        labels = batch.column("labels")
        if (np.diff(labels.offsets.to_numpy()) != 1).any():
            raise UserError("--where: class_name: an image has several labels here; leave it out")
        frame["class_name"] = np.array(classes, object)[labels.flatten().to_numpy()]
    if "pixels" in names:
        frame["pixels"] = frame["width"] * frame["height"]
    if "aspect" in names:
        frame["aspect"] = frame["width"] / frame["height"]
    try:
        result = np.asarray(frame.eval(text.strip(), engine="python", parser="pandas", local_dict={}, global_dict={}))
    except Exception as error:  # noqa: BLE001 - pandas raises a dozen kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--where: {brief(text)}: cannot be evaluated ({reason})") from None
    if result.dtype != np.bool_ or result.shape != (len(frame),):
        raise UserError(f"--where: {brief(text)}: it is neither true nor false of an image; compare with something")
    return result
