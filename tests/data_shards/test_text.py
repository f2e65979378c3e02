"""Text for people: what would move the cursor or hide text is escaped; durations, tables."""

import math
from pathlib import Path

import pytest

from shardvit.data_shards.checking.check import CheckOptions, check
from shardvit.data_shards.checking.page import as_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.text import one_line, printable, show_duration, table
from tests.data_shards.external_tars import write_tar

HARMFUL = ["\x1b[2J", "\x07", "\r", "\b", "\x9b31m", "\u202e", "\u2066", "\u200b", "\x7f", "\udc80", "\t", "\x00"]
HARMLESS = ["photo.png", "Käfer 12", "猫\u3000犬", "a\nb", "\U0001f600", ""]


@pytest.mark.parametrize("text", HARMFUL)
def test_what_moves_or_hides_is_escaped(text: str):
    shown = printable(f"a{text}b")
    assert shown.isprintable() and shown != f"a{text}b" and shown.startswith("a\\") and shown.endswith("b")
    assert str(UserError(f"{text}: no such class")) == f"{printable(text)}: no such class"
    shown.encode()


@pytest.mark.parametrize("text", HARMLESS)
def test_names_of_any_language_stay_as_they_are(text: str):
    assert printable(text) == text
    assert str(UserError(text)) == text


def test_a_name_stays_on_its_line():
    assert one_line("a\nshardvit: all is well") == "a\\nshardvit: all is well"


def test_no_tar_can_write_on_the_screen_of_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    endings = (("png", b"no image"), ("txt", b"\x1b]0;title\x07\na"))
    parts = [(f"\x1b[31m\r{n}\ncheck: all is well.{end}", content) for n in range(3) for end, content in endings]
    write_tar(tmp_path / "x-0.tar", parts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = check(
        ShardsSpec(str(tmp_path), label="txt"),
        options=CheckOptions(decode=True),
        report=lambda line: None,
    )
    text = as_text(result)
    assert "\\x1b[31m\\r0\\ncheck" in text and "\\x1b]0;title\\x07\\na" in text  # keys, a class
    assert text.replace("\n", "").isprintable()
    assert not [line for line in text.split("\n")[:-1] if line.startswith("check:")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00 min"),
        (187, "3:07 min"),
        (3599.6, "1:00 h"),
        (7500, "2:05 h"),
        (86_399, "23:59 h"),
        (90_061, "1 d 1:01 h"),
        (1e8, "1,157 d 9:46 h"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations_have_the_unit_that_fits_them(seconds: float, text: str):
    assert show_duration(seconds) == text


def test_a_table_has_aligned_columns_and_no_spaces_at_the_ends():
    rows = [("stage", "step", "left"), ("a", "1,000", "1:00 h"), ("  long one", "2", "")]
    assert table(rows, align="lr", heading="ruled").split("\n") == [
        "stage        step    left",
        "-------------------------",
        "a           1,000  1:00 h",
        "  long one      2",
    ]
    assert table([], align="lr") == ""


def test_the_last_column_is_wrapped_between_words():
    rows = [("seen", "1", "what it is, in one-or-two words"), ("x", "12", "1e3")]
    assert table(rows, align="lrl", indent="  ", width=40).split("\n") == [
        "  seen   1  what it is, in one-or-two",
        "            words",
        "  x     12  1e3",
    ]
