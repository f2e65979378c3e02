"""The table of metrics in docs/metrics.md, made from `vocabulary.METRICS`.

`python -m pipeline.metrics_table` writes it anew; a test holds the page to it. For developers: nothing imports it.
"""

from pathlib import Path

from pipeline.recipe.vocabulary import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"


def metrics_table() -> str:
    """Markdown, in the vocabulary's order."""
    rows = [(f"`{name}`", metric.unit, metric.meaning.replace("|", "\\|")) for name, metric in METRICS.items()]
    lines = [f"| {' | '.join(row)} |" for row in (("name", "unit", "meaning"), ("---",) * 3, *rows)]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now; ValueError if it has no marks for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN.strip()} or {END}")
    return f"{before}{begin}\n{metrics_table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
