"""Make the table in docs/metrics.md from `vocabulary.METRICS`: `python -m shardvit.pipeline.metrics_table`."""

from pathlib import Path

from shardvit.pipeline.recipe.vocabulary import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->"


def metrics_table() -> str:
    """Format METRICS as Markdown, in order."""
    rows = [(f"`{name}`", metric.unit, metric.meaning.replace("|", "\\|")) for name, metric in METRICS.items()]
    lines = [f"| {' | '.join(row)} |" for row in (("name", "unit", "meaning"), ("---",) * 3, *rows)]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Replace the page's table; ValueError if its markers are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN.strip()} or {END}")
    return f"{before}{begin}\n{metrics_table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
