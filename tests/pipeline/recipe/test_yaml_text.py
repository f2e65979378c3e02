"""Values are those of YAML 1.2; a number that 1.1 reads otherwise is refused, and what is written both read alike."""

from pathlib import Path

import pytest
import yaml

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.yaml_text import read_yaml, write_yaml

TEXT = "name: mine\nstages: {}\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed: 017", "line 3: 017 is 15 in YAML 1.1 and 17 in YAML 1.2: write 15, 17, or '017' for text"),
        ("seed: -017", "line 3: -017 is -15 in YAML 1.1 and -17 in"),
        ("seed: 1:30", "line 3: 1:30 is 90 in YAML 1.1 and text in YAML 1.2: write 90, or '1:30' for text"),
        ("seed: 0b1", "line 3: 0b1 is 1 in"),
        ("seed: 1_000", "line 3: 1_000 is 1000 in"),
        ("seed: +0x1F", "line 3: +0x1F is 31 in"),
        ("model: {mlp: [4, 1_0.5]}", "line 3: 1_0.5 is 10.5 in"),
        ("seed: !!int 1_000", "line 3: 1_000 is 1000 in"),
        ("seed: !!float '1:30'", "line 3: 1:30 is 90 in"),
        ("# ours\u2028seed: 2", "line 3 has U+2028"),
        ("# ours\u2029seed: 2", "line 3 has U+2029"),
        ('experiment: "a\\Lb"', "line 3 has U+2028"),
        ("# ours\x85seed: 2", "line 3 has U+0085"),
    ],
)
def test_what_yaml_1_1_reads_otherwise_is_refused_with_the_line(tmp_path: Path, line: str, expected: str):
    (tmp_path / "mine.yaml").write_text(f"{TEXT}{line}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_recipe(str(tmp_path / "mine.yaml"))
    assert str(caught.value).startswith(str(tmp_path)) and expected in str(caught.value)


def test_an_override_is_read_by_the_same_rule():
    with pytest.raises(UserError, match="override seed=017: line 1: 017 is 15"):
        load_recipe("digits", overrides=["seed=017"])
    assert load_recipe("digits", overrides=["seed=0o17"]).seed == 15


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0o17", 15), ("08", 8), ("0x1F", 31), ("+7", 7), ("-0", 0)),
        *(("1e3", 1000.0), ("3e-4", 0.0003), (".5", 0.5), ("5.", 5.0), ("-.inf", float("-inf")), ("!!float 3", 3.0)),
        *(("'017'", "017"), ("!!str 1_000", "1_000"), ("1_000 steps", "1_000 steps"), ("2024-01-01", "2024-01-01")),
        *(("on", "on"), ("=", "="), ("0x_", "0x_"), ("1.2.3", "1.2.3"), ("~", None), ("", None), ("True", True)),
    ],
)
def test_a_value_is_what_it_is_in_yaml_1_2(text: str, expected: object):
    found = read_yaml(text, source="it")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("text", ["017", "0o17", "1e3", "1:30", "on", "<<", "~", "="])
def test_text_that_looks_like_another_value_is_written_so_that_both_read_text(text: str):
    written = write_yaml({"a": [text], text: 1})
    assert read_yaml(written, source="it") == yaml.safe_load(written) == {"a": [text], text: 1}
