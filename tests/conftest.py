"""What every test gets: one torch thread, a clean environment, and `run_cli` for the real command line."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.preloaded.server import preloaded

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["tests.unstable", "tests.side_by_side", "tests.suite_record"]

# Two processes with as many threads each as there are cores slow one another down several times. Set before torch is
# imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["SHARDVIT_PICTURES"] = "off"  # a process more for each run; what is about pictures switches them on

# A shell that runs the tests in the background has Ctrl-C ignored for them, and so for the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A launcher or a cluster job around the tests, or somebody's MLflow server, must not be seen by the code under test.
FOREIGN_PREFIXES = ("MLFLOW_", "SLURM_", "TORCHELASTIC_", "ACCELERATE_", "DEEPSPEED_", "DS_")
FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for _name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES]:
    del os.environ[_name]

# Deadlines and the check for slow strategies measure how busy the machine is; and what fails should fail everywhere, so
# the examples are the same each time. `--hypothesis-profile=default` has others each time, and keeps those that failed.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where what is marked `gpu` runs."""
    parser.addoption(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="of the tests in tests/gpu; cpu: the same code on the CPU, as if no GPU were there (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, before torch is imported."""
    if config.getoption("--device") == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees no CUDA device (torch is imported for this only if there is any), but
    with `--device cpu` only what has no `device` to run on instead.
    """
    on_cpu = config.getoption("--device") == "cpu"
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if on_cpu:
        marked = [item for item in marked if "device" not in getattr(item, "fixturenames", ())]
    if not marked:
        return
    if not on_cpu and importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _clean_environment() -> Iterator[None]:
    """os.environ after each file of tests as it was before, whatever its fixtures did: an engine makes this a rank."""
    with _restored_environment():
        yield


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """One torch thread, the same random numbers whichever tests ran before, and os.environ afterwards as it was before:
    DeepSpeed and MLflow write into it.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        sys.modules["torch"].manual_seed(0)
    with _restored_environment():
        yield


@contextmanager
def _restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    """`run_cli(*args, cwd, env, timeout_seconds)`: the command line in a process of its own, output captured as text.

    Works from any folder, with the package installed or not. `env` adds to the environment. Standard input is empty.
    After `timeout_seconds` the process is killed and subprocess.TimeoutExpired raised.
    """
    return partial(_run_cli, {})


@pytest.fixture(scope="session")
def preloaded_environment() -> Iterator[Mapping[str, str]]:
    """What makes `shardvit` and its ranks forks of a process that has loaded what they import: seconds less each."""
    with preloaded() as more:
        yield more


@pytest.fixture(scope="session")
def run_preloaded(preloaded_environment: Mapping[str, str]) -> RunCli:
    """`run_cli` with such forks, for who looks at exit codes, output and files rather than at processes."""
    return partial(_run_cli, preloaded_environment)


def python_path(*before: Path) -> str:
    """Put the repository before the caller's PYTHONPATH, which stays: docs/gpu.md installs packages into a folder."""
    return os.pathsep.join([*map(str, before), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _run_cli(
    more: Mapping[str, str],
    *args: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardvit.launch.cli", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), **more, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
