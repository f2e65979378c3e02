"""Time `import shardvit`, and what its first command waits for, in fresh processes.

Run `python -m shardvit.launch.bench.import_time`; output in records/import_time.txt. Target: `import shardvit` adds
less than 0.3 s to an empty process, by the clock in the best of 15 turns and in CPU time in the median, which other
programs on the machine disturb least. The statements take turns. Half a minute on 2 cores.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from shardvit.launch.bench.measure import setting

_TARGET_SECONDS = 0.3
_STATEMENTS = {
    "nothing": "pass",
    "import shardvit": "import shardvit",
    "shardvit --help": "from shardvit.launch.cli import app; app(['--help'], result_action='return_value')",
}
_COUNT = "; import sys; print(len(sys.modules), file=sys.stderr)"


@dataclass(frozen=True)
class Started:
    """One process, from start to exit."""

    seconds: float
    cpu_seconds: float
    modules: int


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Seconds of `import shardvit` in fresh processes.")
    parser.add_argument("--rounds", type=int, default=15, help="processes of each (%(default)s)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[Started]] = {name: [] for name in _STATEMENTS}
    for _ in range(rounds + 1):
        for name, statement in _STATEMENTS.items():
            found[name].append(start(statement))
    print(setting())
    print(f"{rounds} processes each, in turns; the first turn, which reads from disk, does not count\n")
    print(f"{'':<18}{'s, least':>10}{'median':>8}{'CPU s, median':>15}{'modules':>9}")
    least, cpu = {}, {}
    for name, (_, *turns) in found.items():
        least[name], middle = min(each.seconds for each in turns), statistics.median(each.seconds for each in turns)
        cpu[name] = statistics.median(each.cpu_seconds for each in turns)
        print(f"{name:<18}{least[name]:>10.3f}{middle:>8.3f}{cpu[name]:>15.3f}{turns[0].modules:>9}")
    added = [measure["import shardvit"] - measure["nothing"] for measure in (least, cpu)]
    verdict = "met" if max(added) < _TARGET_SECONDS else "MISSED"
    print(f"\nimport shardvit adds {added[0]:.3f} s, {added[1]:.3f} s of CPU; target {_TARGET_SECONDS} s: {verdict}")


def start(statement: str) -> Started:
    """Run a statement in a new Python."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-P", "-c", statement + _COUNT], capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Started(seconds, cpu_seconds, int(done.stderr))


if __name__ == "__main__":
    main()
