"""How the tests are divided among two processes."""

from pathlib import Path

from tests import side_by_side
from tests.side_by_side import FIRST, TOGETHER, group_of

TESTS = Path(side_by_side.__file__).parent


def test_what_is_named_is_there():
    assert [name for name in (*FIRST, *TOGETHER) if not (TESTS / name).exists()] == []


def test_a_file_stays_together_and_so_do_some_folders():
    assert group_of("tests/model/test_vit.py::test_it[a::b/c]") == group_of("tests/model/test_vit.py::TestIt::test_me")
    assert group_of("tests/model/test_vit.py::test_it") != group_of("tests/model/test_loss.py::test_it")
    assert group_of("tests/faults/test_kills.py::test_it") == group_of("tests/faults/test_signals.py::test_it")
