"""What is taken of an engine's state and written: every kind of view, exactly, no more bytes than it has."""

import hashlib
import io
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.engine.saved_state import state_files
from shardvit.pipeline.engine.saved_state.host_copy import HostBuffer, HostCopy
from shardvit.pipeline.engine.saved_state.state_files import (
    Abandoned,
    Seal,
    digest_of,
    piece_digests,
    piece_sizes,
    state_file,
    text_file,
    write_file,
)

BASE = torch.arange(240, dtype=torch.float32)


@st.composite
def views(draw: Any) -> torch.Tensor:
    """A piece of BASE: flat, as a matrix, transposed, with gaps, expanded, a number, or empty."""
    first = draw(st.integers(0, 200))
    piece = BASE[first : first + draw(st.sampled_from([0, 1, 4, 12, 40]))]
    kind = draw(st.sampled_from(["flat", "matrix", "transposed", "gaps", "expanded", "number"]))
    match kind:
        case "matrix" | "transposed" if piece.numel() % 4 == 0:
            matrix = piece.view(4, -1)
            return matrix.t() if kind == "transposed" else matrix
        case "gaps":
            return piece[::3]
        case "expanded" if piece.numel() == 1:
            return piece.expand(5)
        case "number" if piece.numel():
            return piece[0]
    return piece


CPU = torch.device("cpu")


def loaded(file: Any) -> Any:
    stream = io.BytesIO()
    file.write_to(stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@given(st.lists(views(), min_size=1, max_size=6))
def test_views_come_back_as_they_were_shared_or_copied_and_no_byte_is_stored_twice(tensors):
    file = state_file("x.pt", tensors)
    for taken in (file, *HostCopy([file], buffer=HostBuffer(CPU)).run()):
        back = loaded(taken)
        assert [tensor.shape for tensor in back] == [tensor.shape for tensor in tensors]
        assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    reached = {
        number
        for tensor in tensors
        if tensor.numel()
        for number in range(int(tensor.min()), int(tensor.max()) + 1)  # of BASE, gaps between strides included
    }
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in file.tensors or ()}
    assert sum(stored.values()) == 4 * len(reached)


@given(st.lists(views(), min_size=1, max_size=6))
def test_a_file_is_never_larger_than_was_said_and_hardly_smaller(tensors):
    file = state_file("x.pt", {"tensors": tensors, "text": "x" * 1000})
    stream = io.BytesIO()
    file.write_to(stream)
    assert len(stream.getvalue()) <= file.num_bytes <= len(stream.getvalue()) + 8192


def test_what_stands_beside_the_tensors_is_kept_as_it_was():
    class_of_ours = {"step": 3, "nested": [{"scale": [2.0]}], "tensor": torch.ones(1)}
    file = state_file("x.pt", class_of_ours)
    class_of_ours["nested"][0]["scale"][0] = 4.0
    class_of_ours["step"] = 4
    assert loaded(file)["nested"] == [{"scale": [2.0]}] and loaded(file)["step"] == 3


def test_the_seal_is_that_of_the_file_and_parameters_become_plain_tensors(tmp_path: Path):
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for file in (state_file("a/b/x.pt", {"p": parameter}), text_file("y.json", "ä\n")):
        seal = write_file(tmp_path, file)
        path = tmp_path / file.path
        assert seal == Seal(path.stat().st_size, digest_of(path))
    back = torch.load(tmp_path / "a" / "b" / "x.pt", weights_only=True)["p"]
    assert type(back) is torch.Tensor and not back.requires_grad and torch.equal(back, parameter)
    assert (tmp_path / "y.json").read_text(encoding="utf-8") == "ä\n"


def test_a_large_tensor_is_written_piece_by_piece_and_can_be_called_off_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state_files, "_PIECE_BYTES", 1000)
    file, pieces, abandoned = state_file("x.pt", torch.arange(1000.0)), list[int](), threading.Event()
    seal = write_file(tmp_path, file, on_bytes=pieces.append)
    assert sum(pieces) == seal.num_bytes and max(pieces) <= 1000
    assert {1000, 2000, 3000, 4000, 5000} <= set(itertools.accumulate(pieces))  # no digest covers two pieces
    assert seal.blake2b == digest_of(tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    expected = [hashlib.blake2b(content[at : at + 1000], digest_size=16).hexdigest() for at in range(0, 6000, 1000)]
    assert seal.blake2b.split() == [
        digest for digest in expected if digest != hashlib.blake2b(digest_size=16).hexdigest()
    ]
    assert piece_digests(tmp_path / "x.pt", first=2, count=2) == expected[2:4]
    assert list(itertools.accumulate(piece_sizes(seal.num_bytes)))[-1] == seal.num_bytes
    with pytest.raises(Abandoned):
        write_file(tmp_path, file, abandoned=abandoned, on_bytes=lambda n: abandoned.set() if n >= 500 else None)
    assert (tmp_path / "x.pt").stat().st_size < 3000
