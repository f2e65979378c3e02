"""Kept pictures: whole or not there, and read back; their SVG has its text as text and its dark colours."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardvit.pipeline.pictures import style as module
from shardvit.pipeline.pictures.style import ACCENT, DARK, INK, keep_picture, new_figure, plain
from shardvit.pipeline.runs.pictures import Picture, keep_table, kept_pictures, newest_pictures

HOSTILE = "<script>alert(1)</script> $\\frac{a}$ & \x1b[31m\u202e 😀"


def a_picture(name: str = "losses") -> Picture:
    return Picture(name, title="Losses", caption="Loss over steps", alt="Falls from 2 to 1", group="data")


def draw(folder: Path, *, step: int = 3, label: str = "loss") -> Path:
    figure, axes = new_figure(width=4, height=3)
    axes[0, 0].plot([1, 2], [2, 1], color=ACCENT)
    axes[0, 0].set_title(label)
    return keep_picture(folder, a_picture(), figure=figure, step=step)


def test_a_kept_picture_is_read_back_with_its_files(tmp_path: Path) -> None:
    draw(tmp_path, step=400)
    [kept] = kept_pictures(tmp_path)
    assert kept.picture == a_picture() and kept.step == 400
    again = draw(tmp_path, step=401).with_suffix(".svg")
    assert kept.svg and kept.svg.read_bytes() == again.read_bytes(), "the same figure is the same file"
    assert kept.png and kept.png.read_bytes().startswith(b"\x89PNG")


def test_an_svg_has_dark_colours_and_any_name_as_text(tmp_path: Path) -> None:
    svg = draw(tmp_path, label=HOSTILE).with_suffix(".svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert "<script" not in svg and "alert(1)" in svg
    assert "prefers-color-scheme: dark" in svg and f"stroke:{DARK[ACCENT]}" in svg and f"fill: {INK}" in svg


def test_a_picture_without_all_its_files_is_not_there(tmp_path: Path) -> None:
    words = draw(tmp_path)
    words.with_suffix(".png").unlink()
    assert kept_pictures(tmp_path) == []
    draw(tmp_path)
    words.write_text("{")
    assert kept_pictures(tmp_path) == []


def test_a_failure_leaves_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(svg: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "finished_svg", full)
    with pytest.raises(OSError, match="No space"):
        draw(tmp_path)
    assert kept_pictures(tmp_path) == [] and not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        draw(tmp_path / "gone")


def test_tables_are_kept_by_columns_of_one_length(tmp_path: Path) -> None:
    keep_table(tmp_path, a_picture("classes"), columns={HOSTILE: ["a", HOSTILE], "images": [1, 2]}, step=0)
    [kept] = kept_pictures(tmp_path)
    assert kept.table == {HOSTILE: ["a", HOSTILE], "images": [1, 2]} and kept.png is None and kept.svg is None
    with pytest.raises(ValueError, match="classes"):
        keep_table(tmp_path, a_picture("classes"), columns={"a": [1], "b": []}, step=0)


def test_the_newest_of_each_name_by_step(tmp_path: Path) -> None:
    for step in (900, 100, 20_000):
        draw(tmp_path, step=step)
    keep_table(tmp_path, a_picture("classes"), columns={"a": [1]}, step=5)
    kept = kept_pictures(tmp_path)
    assert [(each.picture.name, each.step) for each in kept] == [
        ("classes", 5),
        *(("losses", n) for n in (100, 900, 20_000)),
    ]
    assert [each.step for each in newest_pictures(kept)] == [5, 20_000]


def test_names_are_plain_and_short() -> None:
    assert plain("tabby cat") == "tabby cat"
    assert plain("a\nb\x1b\u202e") == "a\\nb\\x1b\\u202e"
    assert len(plain("x" * 500)) == 40 and plain("a" + "x" * 500 + "z")[0::39] == "az"


@pytest.mark.parametrize("name", ["", "A", "../x", "a b"])
def test_a_picture_needs_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(ValueError, match="no picture's name"):
        a_picture(name)
