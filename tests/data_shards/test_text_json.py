"""JSON that somebody else wrote, for everything here that reads it: one short sentence that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.reading.external_shards import read_classes
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.text import parse_json
from tests.data_shards.external_tars import opened, read_all, write_tar

HOSTILE = {
    "nothing": b"",
    "half": b'{"a": [1,',
    "no text": b"\xff\xfe\x00{",
    "brackets": b"[" * 100_000 + b"]" * 100_000,
    "braces": b'{"label":' * 100_000 + b"1" + b"}" * 100_000,
    "an integer of 5,000 digits": b'{"label": ' + b"9" * 5000 + b"}",
    "a list of such": b"[1, " + b"9" * 5000 + b"]",
}
every_hostile = pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)


def told(error: BaseException, file: str) -> None:
    message = str(error)
    assert file in message and "\n" not in message and len(message) < 500 and "set_int_max_str_digits" not in message


@every_hostile
def test_the_helper(content: bytes):
    with pytest.raises(ValueError, match="not readable as JSON") as caught:
        parse_json(content)
    assert len(str(caught.value)) < 200
    assert parse_json(b'{"a": [1, "\xc3\xa4"]}') == parse_json('{"a": [1, "\u00e4"]}') == {"a": [1, "\u00e4"]}


def within(value: Any, depth: int = 400) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("packed") / "digits"
    pack("digits", out, classes=("0", "1"), holdout=0.2, samples_per_shard=200, report=lambda line: None)
    return json.loads((out / "train" / "manifest.json").read_text())


WRONG = [None, True, -1, 1.5, 2**63, 10**4000, "x" * 10_000, [], {}, within(1), [[]], [{}], {"a": {}}, "\0", "\ud800"]


FREE_TEXT = {"name": str, "split": str, "source": str, 0: str, "sha256": str, "key": type(None)}


@pytest.mark.parametrize(
    "at", [(), ("version",), ("name",), ("split",), ("source",), ("num_samples",), ("classes",), ("classes", 0)]
    + [("label_map",), ("labels",), ("labels", "part"), ("labels", "key"), ("labels", "kind"), ("shards",)]
    + [("shards", 0)] + [("shards", 0, key) for key in ("file", "num_samples", "num_bytes", "sha256")],
    ids=lambda at: ".".join(map(str, at)) or "all",
)  # fmt: skip
def test_wrong_types_and_numbers_in_a_manifest(packed: dict[str, Any], tmp_path: Path, at: tuple[Any, ...]):
    for wrong in WRONG:
        content = place = json.loads(json.dumps(packed))
        for step in at[:-1]:
            place = place[step]
        if not at:
            content = wrong
        elif wrong != "\ud800" and (at[-1] in FREE_TEXT and isinstance(wrong, FREE_TEXT[at[-1]])):
            continue
        else:
            place[at[-1]] = wrong
        if len(at) == 3:  # nor does it help to be consistent
            counts = [shard["num_samples"] for shard in content["shards"]]
            content["num_samples"] = sum(counts) if all(isinstance(one, int) for one in counts) else 0
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(UserError) as caught:
            read_manifest(tmp_path)
        told(caught.value, str(tmp_path))


@pytest.mark.parametrize("content", ["[" * 3000, json.dumps({"a": 10**99}), '{"a": [0]}', '{"a": true}', '{"a": "1"}'])
def test_a_list_of_classes(tmp_path: Path, content: str):
    file = tmp_path / "classes.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"must be 0 to|not readable") as caught:
        read_classes(file)
    told(caught.value, str(file))


@pytest.mark.parametrize("field", ["path", "label"])
@pytest.mark.parametrize("value", [within(1), 10**4000, {"a": 1}], ids=["deep", "long", "table"])
def test_values_that_are_none_in_a_list_of_labels(tmp_path: Path, field: str, value: Any):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps({"path": "a.png", "label": 1, field: value}) + "\n")
    with pytest.raises(UserError) as caught:
        pack(str(tmp_path / "images"), tmp_path / "out", labels=LabelList(file, "path", "label", None))
    told(caught.value, f"{file}, line 1")


LABELS = {
    **HOSTILE,
    "a number beyond 64 bits": b'{"label": 9223372036854775808}',
    "a list in a list": json.dumps({"label": within(1)}).encode(),
}


@pytest.mark.parametrize("name", ["braces", "a number beyond 64 bits", "a list in a list"])
def test_a_label_in_a_tar_costs_its_own_sample(tmp_path: Path, name: str):
    good = [("a.json", b'{"label": 1}'), ("a.png", b"x"), ("c.json", b'{"label": 0}'), ("c.png", b"y")]
    bad = [("b.json", LABELS[name]), ("b.png", b"z")]
    write_tar(tmp_path / "a.tar", good[:2] + bad + good[2:])
    spec = ShardsSpec(str(tmp_path), label="json:label")
    with pytest.raises(UserError) as caught:
        opened(spec, index_folder=tmp_path / "index")
    told(caught.value, str(tmp_path / "a.tar"))
    shards = opened(spec, index_folder=tmp_path / "index", damaged="report")
    assert [sample.key for sample in read_all(shards)] == ["a", "c"] and shards.lost_samples == 1
