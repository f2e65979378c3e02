"""Mistakes of the user that are told together, in one message: mending one must not only lead to the next."""

from collections.abc import Sequence

from data_shards.errors import UserError

_MOST_SHOWN = 20


def refuse_all(problems: Sequence[str]) -> None:
    """Raises UserError with all of them, in one line; nothing where there are none."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        shown = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems[:_MOST_SHOWN], start=1))
        more = f"; and {len(problems) - _MOST_SHOWN:,} more" if len(problems) > _MOST_SHOWN else ""
        raise UserError(f"{len(problems):,} problems: {shown}{more}")


def named(names: Sequence[str], *, most: int = 5) -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() else ascii(name) for name in names[:most]) + more
