"""The README's table of metrics is the vocabulary's."""

import re

import pytest

from shardvit.pipeline.metrics_table import PAGE, metrics_table, with_table
from shardvit.pipeline.recipe.vocabulary import METRICS
from tests.test_repository import ROOT

UNITS = {
    *("nats", "share", "ratio", "epochs", "steps", "images", "images/s", "s", "h", "TFLOP/s", "GiB", "parameters"),
    "",
}


def test_the_page_has_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / PAGE.name).read_text(encoding="utf-8")
    assert with_table(page) == page, "write it anew: python -m shardvit.pipeline.metrics_table"
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| (.+) \|$", metrics_table(), flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(METRICS)
    assert [unit.strip() for _, unit, _ in rows] == [metric.unit for metric in METRICS.values()]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_a_known_unit_and_a_clause_that_says_what_it_is(name: str) -> None:
    metric = METRICS[name]
    assert metric.unit in UNITS
    assert 10 < len(metric.meaning) < 250 and not metric.meaning.endswith(".") and "\n" not in metric.meaning
    shares = name.endswith(("_frac", "top1", "top5", "accuracy", "mfu"))
    assert (metric.unit == "share") >= shares


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks"):
        with_table("# nothing\n")
