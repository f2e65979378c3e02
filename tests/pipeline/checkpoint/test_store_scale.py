"""What a commit costs the file server, and how ranks share the reading of what they check."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.checkpoint import store as checkpoint
from shardvit.pipeline.checkpoint.store import MANIFEST, commit_checkpoint, open_beside
from shardvit.pipeline.engine.saved_state import state_files
from shardvit.pipeline.engine.saved_state.state_files import text_file
from tests.saving import (
    on_ranks,
    restore,
    save,
    steps,
)

RANK0 = "deepspeed/rank0.pt"


def test_a_commit_takes_as_few_operations_whatever_the_number_of_files(tmp_path: Path):
    """As Python's audit hooks see them; a second look at a name would be an os.stat, which has none, so those are
    counted apart."""
    counts: list[int] = []
    for number in (1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        open_beside(root, step=1)
        beside = checkpoint.beside_of(root, 1)
        (beside / "deepspeed").mkdir()
        seals = {
            f"deepspeed/{n}.pt": state_files.write_file(beside, text_file(f"deepspeed/{n}.pt", "x"))
            for n in range(number)
        }
        with operations() as seen:
            commit_checkpoint(root, step=1, seals=seals)
        counts.append(len(seen))
        assert steps(root) == [1] and len(list((root / "step-00000001" / "deepspeed").iterdir())) == number
    assert counts[0] == counts[1] <= 10, seen


@contextlib.contextmanager
def operations() -> Iterator[list[str]]:
    """What is asked of the file system meanwhile."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "open"), (os, "stat"), (os, "scandir"), (os, "listdir"), (os, "rename"), (io, "open")):
            real = getattr(owner, name)

            def counted(*args: Any, real: Any = real, name: str = name, **keywords: Any) -> Any:
                seen.append(f"{name} {args[0]}")
                return real(*args, **keywords)

            patch.setattr(owner, name, counted)
        yield seen


@given(st.lists(st.sampled_from([0, 1, 999, 1000, 1001, 2500, 70_000]), min_size=1, max_size=8), st.integers(1, 9))
def test_ranks_look_at_every_byte_once_and_at_as_many_each(sizes: list[int], num_ranks: int):
    piece = 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "_PIECE_BYTES", piece)
        pieces = [max(1, -(-size // piece)) for size in sizes]
        seals = {
            f"{n}.pt": state_files.Seal(size, " ".join(["d"] * count))
            for n, (size, count) in enumerate(zip(sizes, pieces, strict=True))
        }
        shares = [checkpoint.shared_out(seals, share=(rank, num_ranks)) for rank in range(num_ranks)]
        seen = [(name, number) for share in shares for name, run in share.items() for number in run]
        assert sorted(seen) == sorted((f"{n}.pt", number) for n, count in enumerate(pieces) for number in range(count))
        for share in shares:
            num_bytes = sum(
                state_files.piece_sizes(seals[name].num_bytes)[number] for name, run in share.items() for number in run
            )
            assert num_bytes <= sum(sizes) / num_ranks + piece


def test_a_large_file_is_looked_at_by_all_ranks_and_damage_in_any_piece_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state_files, "_PIECE_BYTES", 100)
    for step in (1, 2):
        on_ranks(3, lambda ranks, step=step: save(tmp_path, step, ranks=ranks))
    file = tmp_path / "step-00000002" / RANK0
    kept = file.read_bytes()
    for position in (0, 150, 299):
        file.write_bytes(kept[:position] + bytes([kept[position] ^ 1]) + kept[position + 1 :])
        for restored, _ in on_ranks(3, lambda ranks: restore(tmp_path, ranks=ranks)):
            assert restored.state.step == 1 and f"{RANK0} has changed" in restored.notes[0]
    file.write_bytes(kept)
    manifest = tmp_path / "step-00000002" / MANIFEST  # one digest of a whole file, as it was written before
    content = json.loads(manifest.read_text())
    for damaged in (False, True):
        content["files"][RANK0]["blake2b"] = "0" * 32 if damaged else state_files.whole_digest(file)
        manifest.write_text(json.dumps(content))
        for restored, _ in on_ranks(3, lambda ranks: restore(tmp_path, ranks=ranks)):
            assert restored.state.step == (1 if damaged else 2)
