"""A table resumes where it stopped and has its means; results read back to the same bits; mistakes are one sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store.store import Store
from shardvit.pipeline.transfer.results import (
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
from shardvit.pipeline.transfer.settings import TransferTable
from shardvit.pipeline.transfer.table import (
    mean_score,
    measure_table,
    open_table,
    read_table,
    set_scores,
)
from tests.pipeline.transfer.small_model import open_small, pack_digits, save_small, store_for


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("table")
    pack_digits(root / "shards")
    save_small(root / "model")
    save_small(root / "other", seed=1)
    return root


def tree_of(work: Path, *changes: dict[str, object]) -> dict[str, list[dict[str, object]]]:
    shards = {"train": str(work / "shards" / "train"), "eval": str(work / "shards" / "val")}
    sets: list[dict[str, object]] = [
        {"name": "a", "group": "natural", **shards},
        {"name": "b", "group": "natural", "method": "knn", "k": [3, 9], **shards},
        {"name": "c", "group": "structured", "method": "fewshot", "shots": 2, "seeds": 2, **shards},
    ]
    for number, change in enumerate(changes):
        sets[number] |= change
    return {"data_sets": sets}


def table_of(work: Path, *changes: dict[str, object]) -> TransferTable:
    return TransferTable.model_validate(tree_of(work, *changes))


def carry_out(
    work: Path,
    table: TransferTable,
    file: Path,
    *,
    model: str = "model",
    told: Callable[[str], None] = lambda name: None,
) -> tuple[TransferRecord, list[str]]:
    """The record, and the sets that were measured."""
    features = store_for(open_small(work / model), work / "features")
    measured: list[str] = []

    def heard(number: int, name: str, found: object | None) -> None:
        if found is not None:
            measured.append(name)
        told(name)

    record = measure_table(
        table,
        open_table(table, store=Store(), say=lambda line: None),
        features=features,
        record=TransferRecord("transfer", "t", "m", features.digest, "pre_logits"),
        file=file,
        most_images=50,
        progress=heard,
    )
    return record, measured


def test_each_set_has_its_method_and_the_means_are_over_sets(work: Path, tmp_path: Path) -> None:
    record, measured = carry_out(work, table_of(work), tmp_path / "t.json")
    assert measured == ["a", "b", "c"] and load_record(tmp_path / "t.json") == record
    scores = set_scores(record)
    assert [scores[name].method for name in "abc"] == ["probe", "knn", "fewshot"]
    assert scores["b"].settings["k"] == 3, "the first of several stands for the set"
    values = {name: each.value for name, each in scores.items()}
    assert record.mean == pytest.approx(sum(values.values()) / 3)
    assert mean_score(record, group="natural") == pytest.approx((values["a"] + values["b"]) / 2)
    assert mean_score(record, group="specialized") is None
    assert {each.train_images for each in record.data_sets if each.name != "c"} == {50}


def test_typed_again_it_goes_on_and_measures_what_changed(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"

    def interrupt(name: str) -> None:
        if name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(work, table_of(work), file, told=interrupt)
    assert load_record(file).mean is None
    whole, measured = carry_out(work, table_of(work), file)
    assert measured == ["c"]
    again, measured = carry_out(work, table_of(work), file)
    assert measured == [] and again == whole

    # another setting of the first, and an interruption: what comes later is not lost
    def at_once(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(work, table_of(work, {"c": 0.5}), file, told=at_once)
    assert carry_out(work, table_of(work, {"c": 0.5}), file)[1] == []
    assert carry_out(work, table_of(work), file, model="other")[1] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 5}, "data_sets.0.k"),  # of another method
        ({"method": "finetune"}, "finetune"),
        ({"group": "artificial"}, "data_sets.0.group"),
        ({"c": [1.0], "hold_out": 0.1}, "hold_out"),
        ({"c": [1.0, 1.0]}, "twice"),
        ({"name": "b"}, "b is named twice"),
        ({"method": "fewshot", "shots": 0}, "data_sets.0.shots"),
        ({"name": "../x"}, "data_sets.0.name"),
    ],
)
def test_mistakes_name_the_key(work: Path, tmp_path: Path, change: dict[str, object], words: str) -> None:
    file = tmp_path / "vtab.yaml"
    file.write_text(yaml.safe_dump(tree_of(work, change)))
    with pytest.raises(UserError, match=r"vtab\.yaml") as caught:
        read_table(file)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"x\.yaml"):
        read_table(tmp_path / "x.yaml")


def test_all_sets_are_opened_before_anything_is_computed(work: Path) -> None:
    table = table_of(work, {}, {}, {"train": str(work / "nowhere")})
    with pytest.raises(UserError, match=r"data set c: .*nowhere"):
        open_table(table, store=Store(), say=lambda line: None)


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
