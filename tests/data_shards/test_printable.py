"""Names from files reach a screen with what would move its cursor, or hide text, escaped."""

import io
import tarfile
from pathlib import Path

import pytest

from data_shards.checking.check import check
from data_shards.checking.page import as_text
from data_shards.errors import UserError
from data_shards.printable import one_line, printable
from data_shards.shard_set import ShardsSpec

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
    with tarfile.open(tmp_path / "x-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(3):
            for ending, content in (("png", b"no image"), ("txt", b"\x1b]0;title\x07\na")):
                info = tarfile.TarInfo(f"\x1b[31m\r{number}\ncheck: all is well.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = check(ShardsSpec(str(tmp_path), label="txt"), decode=True, processes=1, report=lambda line: None)
    text = as_text(result)
    assert "\\x1b[31m\\r0\\ncheck" in text and "\\x1b]0;title\\x07\\na" in text  # keys, a class
    assert text.replace("\n", "").isprintable()
    assert not [line for line in text.split("\n")[:-1] if line.startswith("check:")]
