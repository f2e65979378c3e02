"""Text from files on a screen: names can hold anything, also what moves a terminal's cursor or hides other text."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with control characters, invisible ones and undecodable bytes as Python escapes them; line ends stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\u00a0\u3000" else _escaped(each) for each in text)


def one_line(text: str) -> str:
    """The same of a name, in which a line end is escaped, too."""
    return printable(text).replace("\n", "\\n")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
