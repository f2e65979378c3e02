"""A label is exactly the classes that its bytes state, or a reason why it is none."""

import json
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.shards.labels import LabelSpec, parse_label, read_values
from shardvit.data_shards.vocabulary import LabelKind

CLASSES = ("cat", "dog", "Hündchen", "3", "a b")
LABEL_MAP = {name: number for number, name in enumerate(CLASSES)}


def parse(content: bytes | str, text: str = "cls", kind: LabelKind = "single") -> tuple[int, ...]:
    data = content.encode() if isinstance(content, str) else content
    return parse_label(data, spec=LabelSpec.parse(text, kind=kind), label_map=LABEL_MAP, num_classes=len(CLASSES))


@pytest.mark.parametrize("text", ["cls", "txt", "json:label", "json:a.b.c", "json:a:b"])
def test_text_is_the_inverse_of_parse(text: str):
    assert LabelSpec.parse(text).text == text


@pytest.mark.parametrize("text", ["", "json", "json:", "cls:", "cls:x", "jpg", "CLS", ":label"])
def test_what_is_no_place_of_a_label_is_refused(text: str):
    with pytest.raises(ValueError, match="use cls, txt or json:KEY"):
        LabelSpec.parse(text)


def test_a_key_belongs_to_json_alone():
    for wrong in ({"part": "cls", "key": "x"}, {"part": "json"}, {"part": "jpg"}, {"kind": "many"}):
        with pytest.raises(ValueError, match="label"):
            LabelSpec(**wrong)  # type: ignore[arg-type]


@given(st.integers(0, 4), st.sampled_from(["{}", " {}\n", "{}\n\n", "00{}"]))
def test_a_number_is_a_class_number(number: int, form: str):
    assert parse(form.format(number)) == (number,)
    assert parse(json.dumps({"label": number}), "json:label") == (number,)


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("dog", "cls", 1),
        ("Hündchen\n", "txt", 2),
        ("a b", "txt", 4),
        ("3", "cls", 3),  # a number
        ("3", "txt", 3),  # the name "3", which is number 3 as well
        ('{"a": {"b": "dog"}}', "json:a.b", 1),
        ('{"a.b": 2, "a": {"b": 1}}', "json:a.b", 2),
        ('{"label": [4]}', "json:label", 4),
        ('{"label": "3"}', "json:label", 3),
    ],
)
def test_names_are_looked_up_and_keys_followed(content: str, text: str, expected: int):
    assert parse(content, text) == (expected,)


def test_a_name_that_looks_like_a_number_is_a_name_in_text_and_a_number_in_cls():
    classes = {"0": 0, "1": 1, "10": 2, "2": 3}
    for text, expected in (("txt", 3), ("cls", 2)):
        assert parse_label(b"2", spec=LabelSpec.parse(text), label_map=classes, num_classes=4) == (expected,)
    spec = LabelSpec.parse("txt")
    assert parse_label(b"3", spec=spec, label_map=classes, num_classes=4) == (3,)  # no such name


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("[0, 2]", "cls", (0, 2)),
        ('["dog", 0]', "txt", (1, 0)),
        ("0 2", "cls", (0, 2)),
        ("cat, dog\n", "txt", (0, 1)),
        ("4\n1\n", "cls", (4, 1)),
        ("", "cls", ()),
        ("[]", "txt", ()),
        ('{"label": []}', "json:label", ()),
        ('{"label": ["dog", "dog", 1]}', "json:label", (1,)),
        ('{"label": 2}', "json:label", (2,)),
    ],
)
def test_lists(content: str, text: str, expected: tuple[int, ...]):
    assert parse(content, text, "multi") == expected


@pytest.mark.parametrize(
    ("content", "text", "kind", "reason"),
    [
        (b"", "cls", "single", "empty"),
        (b"-1", "cls", "single", "label -1 is no class number"),
        (b"5", "cls", "single", "label 5.*5 classes"),
        (b"9" * 5000, "cls", "single", "no class number"),
        (b"9" * 5000, "txt", "single", "no class number"),
        ("²".encode(), "cls", "single", "no class number"),
        (b"Dog", "txt", "single", "'Dog' is no class number and no name"),
        (b"\xff", "txt", "single", "no UTF-8"),
        (b"{", "json:x", "single", "not readable as JSON"),
        (b"[" * 100_000, "json:x", "single", "not readable as JSON"),
        (b"[1]", "json:x", "single", "key 'x' is not in"),
        (b'{"x": null}', "json:x", "single", "null"),
        (b'{"x": true}', "json:x", "single", "true"),
        (b'{"x": 1.0}', "json:x", "single", "1.0"),
        (b'{"x": -1}', "json:x", "single", "label -1"),
        (b'{"x": {}}', "json:x", "single", "no class number"),
        (b'{"x": [0, 1]}', "json:x", "single", "list of 2"),
        (b'{"x": []}', "json:x", "single", "list of 0"),
        (b'{"a": 1}', "json:a.b", "single", "key 'a.b'"),
        (b"0 x", "cls", "multi", "'x' is no class"),
        (b'{"x": [[1]]}', "json:x", "multi", "no class number"),
    ],
)
def test_what_is_no_label_gives_a_reason(content: bytes, text: str, kind: LabelKind, reason: str):
    with pytest.raises(ValueError, match=reason) as caught:
        parse(content, text, kind)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@given(st.binary(max_size=40), st.sampled_from(["cls", "txt", "json:x"]), st.sampled_from(["single", "multi"]))
def test_any_bytes_are_a_label_or_a_reason(content: bytes, text: str, kind: LabelKind):
    spec = LabelSpec.parse(text, kind=kind)
    with suppress(ValueError):  # nothing else
        numbers = parse(content, text, kind)
        assert all(0 <= number < len(CLASSES) for number in numbers) and len(set(numbers)) == len(numbers)
        assert kind == "multi" or len(numbers) == 1
        assert bool(read_values(content, spec=spec)) == bool(numbers)


def test_needs_neither_torch_nor_numpy():
    code = "import sys, shardvit.data_shards.shards.labels; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
