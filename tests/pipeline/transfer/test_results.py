"""A result reads back to the same bits, and what is broken is passed over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.transfer.results import (
    TRANSFER_FOLDER,
    TransferRecord,
    TransferScore,
    UsedSet,
    file_name,
    load_record,
    metrics_of,
    save_record,
    transfer_records,
)

RECORD = TransferRecord(
    command="fewshot",
    name="pets",
    model="runs/x/pretrain/model",
    model_digest="ab",
    layer="pre_logits",
    run="x",
    stage="pretrain",
    images_seen=51200,
    data_sets=(UsedSet("p\x1bets", "a", "b", "c", "d", 37, 185, 3669, group="natural"),),
    results=(TransferScore("p\x1bets", "fewshot", "top1", 0.1 + 0.2, (0.1, 0.5), settings={"shots": 5, "l2": 1024.0}),),
)


def test_a_result_reads_back_to_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / TRANSFER_FOLDER / "pets.json"
    save_record(file, RECORD)
    assert load_record(file) == RECORD
    assert transfer_records(tmp_path) == [RECORD]


def test_what_is_broken_or_of_another_format_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / TRANSFER_FOLDER
    save_record(folder / "b.json", replace(RECORD, name="b"))
    (folder / "a.json").write_text("{")
    later = json.loads((folder / "b.json").read_text()) | {"format": 2}
    (folder / "c.json").write_text(json.dumps(later))
    assert [each.name for each in transfer_records(tmp_path)] == ["b"]
    for name in ("a.json", "c.json", "missing.json"):
        with pytest.raises(ValueError, match=name):
            load_record(folder / name)
    assert transfer_records(tmp_path / "nowhere") == []


def test_several_sets_of_one_name_are_told_apart_by_their_digests(tmp_path: Path) -> None:
    (used,) = RECORD.data_sets
    other = replace(RECORD, data_sets=(replace(used, eval_digest="other"),))
    assert other.data_sets[0].digest != used.digest == replace(used, train="elsewhere").digest
    for name, record in (("a", RECORD), ("b", other), ("c", replace(RECORD, layer="pooled"))):
        save_record(tmp_path / TRANSFER_FOLDER / f"{name}.json", record)
    found = transfer_records(tmp_path)
    names = [f"{used.name}_{each.data_sets[0].digest}" for each in (RECORD, other, RECORD)]
    assert [each.data_sets[0].name for each in found] == [each.results[0].data_set for each in found] == names
    assert len({metric for each in found for metric in metrics_of(each)}) == 2


def test_names_become_names_of_files() -> None:
    assert file_name("fewshot-../a b/\x1b") == "fewshot-..-a-b"
    assert file_name("...") == "unnamed"
