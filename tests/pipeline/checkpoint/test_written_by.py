"""Who wrote a checkpoint: what is kept, and what counts as a change."""

from importlib.metadata import version

import numpy as np

from pipeline.checkpoint.written_by import changed_since, written_by


def test_versions_and_revision_are_those_that_run():
    facts = written_by()
    assert facts["torch"] == version("torch") and facts["numpy"] == np.__version__
    assert facts["revision"] and all(isinstance(value, str) and value for value in facts.values())


def test_changes_are_named_and_neither_host_nor_time_is_one():
    now = written_by()
    assert changed_since(now, now) == []
    before = now | {"torch": "2.11.0", "host": "elsewhere", "time": "2020-01-01T00:00:00+0000"}
    assert changed_since(before, now) == [f"torch 2.11.0 -> {now['torch']}"]


def test_what_an_older_checkpoint_does_not_know_is_no_change():
    assert changed_since({}, written_by()) == []
