"""`pytest --once-more`: a test that fails is run once more, alone in a fresh process, after all others.

If it passes then, it is unstable: it fails nothing, and is shown with the first failure's output in a block UNSTABLE.
If more than MOST tests fail, none is run again. Nothing else is retried: no collection error, no session that was
stopped early (-x), no test in which a worker process died.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator

import pytest

MOST = 3
PATIENCE_SECONDS = 3600.0  # each test has its own time limit; this is for a process that does not end after its test
NODE_ID = "SHARDVIT_TEST_ONCE_MORE"  # in the environment of a fresh process: the test that it is for
PASSED_ALONE = 86  # its exit status, which no test brings about by os._exit(0), and neither does one that is skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    """The switch, which `make test` sets."""
    parser.addoption(
        "--once-more",
        action="store_true",
        help=f"run what fails (up to {MOST} tests) once more at the end, each alone; what passes then fails nothing",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the first process gather failures, in a fresh one run the one test; in xdist's workers nothing."""
    if not config.getoption("--once-more") or hasattr(config, "workerinput"):
        return
    if node_id := os.environ.pop(NODE_ID, None):
        config.args = [os.path.join(config.rootpath, node_id)]  # pathlib would change an id such as "test_it[a//b]"
        for output in ("xmlpath", "faults_table", "suite_record", "table"):  # these files are of the whole session
            setattr(config.option, output, None)
        config.pluginmanager.register(_Alone())
    elif not config.option.usepdb:
        config.pluginmanager.register(_OnceMore(config))


class _Alone:
    """The fresh process: it says so if its test has passed."""

    def __init__(self) -> None:
        self.outcomes: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes.add("xfailed" if hasattr(report, "wasxfail") else report.outcome)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield
        if session.exitstatus == pytest.ExitCode.OK and self.outcomes & {"passed", "xfailed"}:
            session.exitstatus = PASSED_ALONE


class _OnceMore:
    """The first process: it gathers the failures and tries their tests again."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.environment = dict(os.environ)
        self.failures: dict[str, list[pytest.TestReport]] = {}
        self.unstable: dict[str, list[pytest.TestReport]] = {}
        self.tests_alone_failed = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tests_alone_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.setdefault(report.nodeid, []).append(report)
            if report.when not in ("setup", "call", "teardown"):  # xdist's word for a worker that died
                self.tests_alone_failed = False

    @pytest.hookimpl(wrapper=True, trylast=True)  # when fixtures and workers are gone, before the terminal's summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield
        stopped = session.shouldfail or session.shouldstop
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or stopped or not self.tests_alone_failed:
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        terminal.line("")  # the dots of two halves end without one
        if len(self.failures) > MOST:
            terminal.write_sep("-", f"{len(self.failures)} tests failed, more than {MOST}: none is run once more")
            return
        for node_id, reports in self.failures.items():
            terminal.write_sep("-", f"once more, alone: {node_id}")
            passed, output = self._run(node_id)
            if passed:
                self.unstable[node_id] = reports
            else:
                reports[-1].sections.append(("once more, alone", output))
        if self.unstable:
            self._recount(terminal)
        if len(self.unstable) == len(self.failures):
            session.exitstatus = pytest.ExitCode.OK

    def _run(self, node_id: str) -> tuple[bool, str]:
        """The same command for this test alone: whether it passed, and what was printed."""
        arguments = [str(argument) for argument in self.config.invocation_params.args]
        if self.config.pluginmanager.hasplugin("xdist"):
            arguments += ["-n", "0"]
        if self.config.option.basetemp:  # pytest empties it as it begins
            arguments += ["--basetemp", f"{self.config.option.basetemp}-once-more"]
        with tempfile.TemporaryFile() as output:  # a pipe would be open for as long as anything that the test left
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=self.config.invocation_params.dir,
                env={**self.environment, NODE_ID: node_id},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                passed = process.wait(PATIENCE_SECONDS) == PASSED_ALONE
            except subprocess.TimeoutExpired:
                passed = False
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            return passed, output.read().decode(errors="replace")

    def _recount(self, terminal: pytest.TerminalReporter) -> None:
        """An unstable test counts once, as that: it may have passed, and failed in its teardown."""
        for category, reports in list(terminal.stats.items()):
            terminal.stats[category] = [
                report
                for report in reports
                if not (isinstance(report, pytest.TestReport) and report.nodeid in self.unstable)
            ]
            if not terminal.stats[category]:
                del terminal.stats[category]
        terminal._add_stats("unstable", [reports[0] for reports in self.unstable.values()])
        terminal._set_main_color()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unstable:
            return
        terminalreporter.section("UNSTABLE", yellow=True)
        for node_id, reports in self.unstable.items():
            for report in reports:
                terminalreporter.write_sep("_", f"{report.when} of {node_id}")
                terminalreporter.write_line(report.longreprtext)
                for name, text in report.sections:
                    terminalreporter.write_sep("-", name)
                    terminalreporter.write_line(text.rstrip("\n"))
        number = len(self.unstable)
        terminalreporter.write_sep("_", f"{number} unstable: failed, and passed when run once more, alone")
        for node_id in self.unstable:
            terminalreporter.write_line(f"UNSTABLE {node_id}")
