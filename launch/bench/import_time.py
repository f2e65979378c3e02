"""Time `import shardvit`, and what its first command waits for, in fresh processes.

Run `python -m shardvit.launch.bench.import_time`; output in records/import_time.txt. Target: `import shardvit` adds
less than 0.3 s of wall time to an empty process, as the median of 15. They take turns. Half a minute on 2 cores.
"""

import argparse
import statistics
import subprocess
import sys
import time

from shardvit.launch.bench.measure import setting

_TARGET_SECONDS = 0.3
_STATEMENTS = {
    "nothing": "pass",
    "import shardvit": "import shardvit",
    "shardvit --help": "from shardvit.launch.cli import app; app(['--help'], result_action='return_value')",
}
_COUNT = "; import sys; print(len(sys.modules), file=sys.stderr)"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Seconds of `import shardvit` in fresh processes.")
    parser.add_argument("--rounds", type=int, default=15, help="processes of each (%(default)s)")
    rounds = parser.parse_args().rounds
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in _STATEMENTS}
    for _ in range(rounds + 1):
        for name, statement in _STATEMENTS.items():
            taken[name].append(seconds_and_modules(statement))
    print(setting())
    print(f"{rounds} processes each, in turns; the first turn, which reads from disk, does not count\n")
    print(f"{'':<18}{'median s':>10}{'least':>8}{'worst':>8}{'modules':>9}")
    medians = {}
    for name, (_, *found) in taken.items():
        seconds = [each for each, _ in found]
        medians[name] = statistics.median(seconds)
        print(f"{name:<18}{medians[name]:>10.3f}{min(seconds):>8.3f}{max(seconds):>8.3f}{found[0][1]:>9}")
    added = medians["import shardvit"] - medians["nothing"]
    verdict = "met" if added < _TARGET_SECONDS else "MISSED"
    print(f"\nimport shardvit adds {added:.3f} s; target {_TARGET_SECONDS} s: {verdict}")


def seconds_and_modules(statement: str) -> tuple[float, int]:
    """Run a statement in a new Python; its wall time from start to exit, and how many modules it has loaded."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-P", "-c", statement + _COUNT], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, int(done.stderr)


if __name__ == "__main__":
    main()
