"""`shardvit doctor`: the command. Imports the checks late, to keep `--help` fast."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shardvit.launch.doctor.findings import Check, Diagnosis
from shardvit.launch.flags import JsonFlag, switch
from shardvit.launch.local.env import num_gpus, tracking_uri, without_place
from shardvit.launch.local.output import say
from shardvit.pipeline.ranks.start_clock import StartClock

_LEFT_OUT = ("imports", "arithmetic", "decoding", "all-reduce", "collect_env", "ds_report")


def doctor(
    *,
    quick: Annotated[bool, switch("Leave out what is tried in child processes: a second in all.")] = False,
    runs: Annotated[Path, Parameter(help="Folder of all runs, whose disk is checked.")] = Path("runs"),
    as_json_text: JsonFlag = False,
) -> int:
    """Report what this machine can run: findings, verdicts and what to do.

    Checks Python, cores, memory, disk and shared memory; the packages, against
    what shardvit asks for; GPUs, driver, and arithmetic in bf16; an all-reduce
    of two processes, on gloo and NCCL; MLflow's server. Changes nothing. A
    library that crashes or hangs is reported, with its signal or time-out.
    The output of torch's collect_env and DeepSpeed's ds_report comes first.

    Verdicts: fine; note (works, but read on); problem; absent (not here, which
    may be fine). Exit code 1 if there is a problem. Takes half a minute, nearly
    all of it to import the libraries.

    Some examples:
        shardvit doctor
        shardvit doctor --quick --runs /scratch/me/runs

        srun --nodes 1 --gpus-per-node 8 shardvit doctor --json > doctor.json
    """
    import json

    with closing(StartClock("doctor", say=say, part="looking around")) as clock:
        diagnosis = examine(runs=runs, depth="quick" if quick else "all", clock=clock)
    print(json.dumps(diagnosis.as_json(), indent=1) if as_json_text else diagnosis.as_text())
    return diagnosis.exit_code


def examine(*, runs: Path, depth: Literal["all", "quick"], clock: StartClock) -> Diagnosis:
    """Run all checks; "quick" leaves out those in child processes. `clock` shows which one is running."""
    from shardvit.launch.doctor import gpus, libraries, machine, network, trials

    begin = time.monotonic()
    environment, visible = without_place(), num_gpus()
    tried: Mapping[str, Sequence[Check]] = {}
    backends: tuple[trials.Backend, ...] = ()
    reports: Mapping[str, str] = {}
    if depth == "all":
        tried = trials.try_parts(trials.ALONE, environment=environment, clock=clock)
        backends = ("gloo", "nccl") if visible > 1 else ("gloo",)
        clock.set_status("asking collect_env and ds_report")
        reports = trials.full_reports(environment=environment)

    def of(*parts: str) -> list[Check]:
        return [check for name in parts for check in tried.get(name, ())]

    imports = [name for name in tried if name.startswith("import:")]
    loaded = ", ".join(name.removeprefix("import:") for name in imports if not tried[name])
    looks: dict[str, Callable[[], Sequence[Check]]] = {
        "machine": lambda: machine.machine_checks(runs=runs, gpus=visible, pythons=libraries.read_requirements()[0]),
        "libraries": lambda: [
            *libraries.library_checks(libraries.read_requirements()[1]),
            *([Check("imports", "fine", loaded)] if loaded else []),
            *of(*imports, "decoders"),
        ],
        "GPUs and arithmetic": lambda: [
            gpus.check_gpus(devices=num_gpus({}), visible=visible),
            *of("torch", "arithmetic"),
        ],
        "network": lambda: [
            *(check for each in backends for check in trials.try_all_reduce(each, environment=environment)),
            network.check_tracking(tracking_uri(form="any")),
        ],
    }
    checks: dict[str, Sequence[Check]] = {}
    for subject, look in looks.items():
        clock.set_status(f"looking at the {subject}")
        try:
            checks[subject] = look()
        except Exception as error:  # noqa: BLE001 - whatever is odd about a machine, the other checks are made
            said = f"the doctor failed: {type(error).__name__}: {error}"
            checks[subject] = [Check(subject, "problem", said, "please report it, with what is special here")]
    left_out = _LEFT_OUT if depth == "quick" else ()
    return Diagnosis(checks, left_out=left_out, seconds=time.monotonic() - begin, reports=reports)
