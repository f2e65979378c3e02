"""Children that crash, hang, are missing or print what they like are answers, and nothing of them is left."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardvit.launch.doctor import child
from shardvit.launch.doctor.child import MARK, ask, run_children
from tests.launch.clock import Clock


def run(*codes: str, limit_seconds: float = 240):
    commands = [[sys.executable, "-c", code] for code in codes]
    return run_children(commands, environments=[os.environ] * len(codes), limit_seconds=limit_seconds)


def test_what_a_child_says_and_how_it_ends():
    code = f"import sys; print('noise'); print('{MARK}' + '{{\"a\": 1}}'); print('why', file=sys.stderr); sys.exit(3)"
    [answer] = run(code)
    assert answer.messages == [{"a": 1}] and answer.code == 3
    assert answer.ending == "ended with exit code 3: why"


def test_a_crash_has_its_signals_name():
    [answer] = run("import os; os.kill(os.getpid(), 11)")
    assert answer.code == -11 and answer.ending.startswith("died of signal 11 (SIGSEGV)")


def test_a_hang_ends_with_its_time_and_takes_its_own_children_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child, "time", Clock(tmp_path / "told"))
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print('{MARK}' + '{{\"child\": %d}}' % child.pid, flush=True)\n"
        f"open({str(tmp_path / 'told')!r}, 'w').close(); time.sleep(600)"
    )
    [answer] = run(code, limit_seconds=600)
    assert answer.code is None and answer.ending == "did not end within 600 seconds and was killed"
    pid = answer.messages[0]["child"]
    deadline = time.monotonic() + 240
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_when_one_of_two_fails_the_other_is_not_waited_for():
    begin = time.monotonic()
    failed, waiting = run("raise SystemExit(1)", "import time; time.sleep(600)", limit_seconds=600)
    assert failed.code == 1 and waiting.code is None
    assert time.monotonic() - begin < 300


@pytest.mark.parametrize("begun", ['{"a": ', '{"a": {}'])
def test_a_message_that_was_cut_off_is_not_one(begun: str):
    [answer] = run(f"import os; os.write(1, {MARK + begun!r}.encode()); os.kill(os.getpid(), 9)")
    assert answer.messages == []


def test_a_command_that_is_missing_or_wants_input():
    assert ask(["no-such-command-anywhere"]).code == 127
    assert "no-such-command-anywhere" in ask(["no-such-command-anywhere"]).ending
    assert ask([sys.executable, "-c", "input()"], limit_seconds=240).code == 1  # at once: there is nobody to type
