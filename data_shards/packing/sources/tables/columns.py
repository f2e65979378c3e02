"""Find the image and label columns of a table, and read its rows a few at a time. The seam of pyarrow's readers.

Parquet is read a piece of a column at a time (8 MiB), Arrow a record batch at a time. Only values of plain types are
read: extension types, which other programs unpickle, are refused, and nothing becomes a pandas object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.store.ranges import open_file
from shardvit.data_shards.text import parse_json
from shardvit.data_shards.vocabulary import LabelKind

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = (".parquet", ".arrow", ".feather")
_READ_BYTES = 8 << 20
_ROWS_AT_ONCE = 64  # images in memory
_PART_BYTES = 1 << 28  # of row groups that one worker reads
_LABELS = ("label", "labels", "fine_label", "class", "cls", "target")
_PATHS = ("image", "path", "file_name", "filename", "file_path", "image_path", "img_path")
_EXTENSION = b"ARROW:extension:name"

Form = Literal["struct", "bytes", "path"]


class Rows(NamedTuple):
    """Consecutive rows of a table: row groups `first` to `end` of parquet, or all of an Arrow file."""

    first: int
    end: int
    begin: int  # the first row


@dataclass(frozen=True)
class Columns:
    """Which columns hold the images, their labels ("": none) and keys (""), and how."""

    image: str
    form: Form  # struct: Hugging Face's {bytes, path}
    label: str = ""
    kind: LabelKind = "single"
    key: str = ""
    classes: tuple[str, ...] | None = None  # names of the labels' numbers, as Hugging Face's metadata have them

    @property
    def names(self) -> list[str]:
        return [name for name in (self.image, self.label, self.key) if name]


def is_table(name: str) -> bool:
    """True for the name or URL of a parquet or Arrow file."""
    return redacted(name).lower().endswith(TABLES)


def find_columns(schema: pa.Schema, *, image: str | None, label: str | None, key: str, table: str) -> Columns:
    """Find the columns; `label` "" for none. UserError names those to choose from."""
    import pyarrow.types as is_

    forms: dict[str, Form | None] = {str(field.name): _form(field) for field in schema}
    chosen = image or _only_image(schema, forms, table)
    demand_column(schema, chosen, flag="--image-column", table=table)
    if (form := forms[chosen]) is None:
        raise UserError(
            f"{table}: the column {chosen!r} is of type {_type(schema.field(chosen))}: images are bytes, "
            "{bytes, path} or paths; choose with --image-column"
        )
    if label is None:
        named = [name for name in _LABELS if name in forms and name != chosen]
        if len(named) != 1:
            known = ", ".join(named or [name for name in forms if name != chosen]) or "none other"
            raise UserError(f"{table}: which column holds the labels ({known})? Name it with --label-column")
        label = named[0]
    if not label:
        return Columns(chosen, form, key=key if key in forms else "")
    demand_column(schema, label, flag="--label-column", table=table)
    field = schema.field(label)
    is_list = is_.is_list(field.type) or is_.is_large_list(field.type) or is_.is_fixed_size_list(field.type)
    kind, value = field.type, field.type.value_type if is_list else field.type
    if is_.is_dictionary(kind):
        value = kind.value_type
    if _is_extension(field) or not (is_.is_integer(value) or _is_text(value)):
        raise UserError(
            f"{table}: the column {label!r} is of type {_type(field)}: a label is a whole number, a name, or a list "
            "of these; choose with --label-column"
        )
    return Columns(chosen, form, label, "multi" if is_list else "single", classes=_class_names(schema, label))


def open_schema(location: str) -> tuple[pa.Schema, list[Rows]]:
    """Read a table's schema, and cut it into parts of 256 MiB; UserError if it is no such table."""
    with reading(location):
        if not _is_parquet(location):
            with _arrow(location, None) as reader:
                return reader.schema, [Rows(0, 0, 0)]
        with _parquet(location) as file:
            parts, sizes, first, begin, row = list[Rows](), 0, 0, 0, 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                row, sizes = row + about.num_rows, sizes + about.total_byte_size
                if sizes >= _PART_BYTES or group == file.num_row_groups - 1:
                    parts.append(Rows(first, group + 1, begin))
                    first, begin, sizes = group + 1, row, 0
            return file.schema_arrow, parts


def read_rows(location: str, rows: Rows, columns: Columns) -> Iterator[tuple[Any, ...]]:
    """Yield (image, label, key) of each row, None where there is none; UserError if the table is damaged."""
    with reading(location):
        for batch in read_batches(location, columns.names, rows=_ROWS_AT_ONCE, groups=range(rows.first, rows.end)):
            nothing = [None] * batch.num_rows
            names = columns.image, columns.label, columns.key
            yield from zip(*(batch[name].to_pylist() if name else nothing for name in names), strict=True)


def read_batches(
    location: str, names: list[str], *, rows: int, groups: range | None = None
) -> Iterator[pa.RecordBatch]:
    """Read some columns in order, at most so many rows at a time, of all or some row groups; pyarrow's errors."""
    if _is_parquet(location):
        with _parquet(location) as file:
            groups = range(file.num_row_groups) if groups is None else groups
            yield from file.iter_batches(rows, row_groups=[*groups], columns=names, use_threads=False)
        return
    with _arrow(location, None) as reader:
        fields = [reader.schema.get_field_index(name) for name in names]
    with _arrow(location, fields) as reader:
        batches = (reader.get_batch(at) for at in range(reader.num_record_batches)) if _is_file(reader) else reader
        for batch in batches:
            yield from (batch.slice(at, rows) for at in range(0, batch.num_rows, rows))


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Turn pyarrow's errors into a sentence that names the table."""
    from pyarrow import ArrowException

    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{redacted(location)}: there is no such table; correct the name or copy it there") from None
    except (ArrowException, OSError, KeyError) as error:
        text = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(f"{redacted(location)}: it cannot be read as a table ({text}); fetch it again") from None


@contextmanager
def _parquet(location: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with open_file(location, ahead_bytes=_READ_BYTES) as source:
        yield pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False)


@contextmanager
def _arrow(location: str, fields: list[int] | None) -> Iterator[Any]:
    from pyarrow import ArrowInvalid, ipc

    options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    with open_file(location, ahead_bytes=_READ_BYTES) as source:
        try:
            reader = ipc.open_file(source, options=options)
        except ArrowInvalid:  # Hugging Face's `save_to_disk` writes streams
            source.seek(0)
            reader = ipc.open_stream(source, options=options)
        with reader:
            yield reader


def _is_file(reader: Any) -> bool:
    return hasattr(reader, "num_record_batches")


def _is_parquet(location: str) -> bool:
    return redacted(location).lower().endswith(".parquet")


def _form(field: pa.Field) -> Form | None:
    import pyarrow.types as is_

    if _is_extension(field):
        return None
    if is_.is_struct(field.type):
        inside = {each.name: each for each in field.type}
        return "struct" if "bytes" in inside and _form(inside["bytes"]) == "bytes" else None
    if is_.is_binary(field.type) or is_.is_large_binary(field.type) or is_.is_fixed_size_binary(field.type):
        return "bytes"
    return "path" if _is_text(field.type) else None


def _is_extension(field: pa.Field) -> bool:
    from pyarrow import BaseExtensionType

    return isinstance(field.type, BaseExtensionType) or _EXTENSION in (field.metadata or {})


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as is_

    return is_.is_string(kind) or is_.is_large_string(kind)


def _type(field: pa.Field) -> str:
    name = (field.metadata or {}).get(_EXTENSION, b"").decode("ascii", "replace")
    return f"the extension {name}, which is not unpickled or run" if name else str(field.type)[:80]


def _only_image(schema: pa.Schema, forms: Mapping[str, Form | None], table: str) -> str:
    found = [name for name, form in forms.items() if form == "struct"]
    found = found or [name for name, form in forms.items() if form == "bytes"]
    found = found or [name for name in _PATHS if forms.get(name) == "path"]
    found = found or [field.name for field in schema if _is_extension(field)]  # refused by its type
    if len(found) == 1:
        return found[0]
    what = f"several columns may hold the images ({', '.join(found)})"
    if not found:
        what = f"none of its columns ({', '.join([*forms][:20])}) holds images' bytes or is called path or file_name"
    raise UserError(f"{table}: {what}; choose with --image-column")


def demand_column(schema: pa.Schema, name: str, *, flag: str, table: str) -> None:
    """UserError that names the columns and `flag`, unless there is one of that name."""
    if schema.names.count(name) != 1:
        raise UserError(f"{table}: there is no single column {name!r} ({', '.join(schema.names[:20])}); correct {flag}")


def _class_names(schema: pa.Schema, label: str) -> tuple[str, ...] | None:
    """Read the names of Hugging Face's ClassLabel, if the column is one."""
    try:
        feature = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"][label]
        while "names" not in feature:  # a list of labels
            feature = feature["feature"] if isinstance(feature, dict) else feature[0]
        names = tuple(feature["names"])
    except (KeyError, TypeError, ValueError, IndexError, json.JSONDecodeError):
        return None
    usable = all(isinstance(name, str) and name and name.isprintable() for name in names)
    return names if usable and len({*names}) == len(names) > 0 else None
