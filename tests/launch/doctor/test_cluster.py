"""SLURM, the launcher and the remote shells, from commands and answers that the test makes up."""

import pytest

from launch.doctor.child import Answer
from launch.doctor.cluster import Cluster, cluster_checks, read_cluster

SLURM = frozenset({"sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"})
SINFO = "gpu*|up|2-00:00:00|16|gpu:h200:8\nold|drain|1:00:00|1|(null)\n"


def verdicts(commands: frozenset[str] = SLURM, *, sinfo: Answer | None = None, launcher: bool = True):
    return {check.name: check for check in cluster_checks(Cluster(commands, sinfo, launcher))}


def test_partitions_in_words():
    check = verdicts(sinfo=Answer(0, SINFO, "", 10))["SLURM"]
    assert check.verdict == "fine"
    assert check.found == (
        "partitions gpu* (16 nodes with gpu:h200:8, at most 2-00:00:00); old (1 node, at most 1:00:00, drain)"
    )


def test_of_many_partitions_some_are_shown():
    lines = "".join(f"p{number}|up|1:00|1|(null)\n" for number in range(30))
    assert verdicts(sinfo=Answer(0, lines, "", 10))["SLURM"].found.endswith("; and 22 more")


@pytest.mark.parametrize(
    ("commands", "sinfo", "verdict", "words"),
    [
        (frozenset(), None, "absent", "not on PATH"),
        (SLURM - {"sbatch"}, Answer(0, SINFO, "", 10), "note", "sbatch missing"),
        (
            SLURM,
            Answer(1, "", "Unable to contact slurm controller\n", 10),
            "note",
            "Unable to contact slurm controller",
        ),
        (SLURM, Answer(None, "", "", 10), "note", "did not end within 10 seconds"),
        (SLURM, Answer(0, "", "", 10), "note", "no partitions"),
    ],
)
def test_slurm(commands: frozenset[str], sinfo: Answer | None, verdict: str, words: str):
    check = verdicts(commands, sinfo=sinfo)["SLURM"]
    assert check.verdict == verdict and words in check.found


def test_launcher_and_remote_shells():
    found = verdicts(frozenset({"ssh"}), launcher=False)
    assert found["deepspeed launcher"].verdict == "problem"
    assert found["ssh, pdsh"].found == "ssh"
    assert verdicts(frozenset({"ssh", "pdsh"}))["ssh, pdsh"].found == "pdsh and ssh"
    assert verdicts(frozenset())["ssh, pdsh"].verdict == "absent"
    assert verdicts()["deepspeed launcher"].verdict == "fine"


def test_sinfo_is_asked_only_where_it_is():
    def run(command: tuple[str, ...], *, limit_seconds: float) -> Answer:
        asked.append(command[0])
        return Answer(0, SINFO, "", limit_seconds)

    asked: list[str] = []
    without = read_cluster(which=lambda name: "/bin/ssh" if name == "ssh" else None, run=run)
    assert asked == [] and without.commands == {"ssh"} and without.sinfo is None
    there = read_cluster(which=lambda name: f"/bin/{name}", run=run)
    assert asked == ["sinfo"] and there.commands == SLURM | {"ssh", "pdsh"}
    assert there.has_deepspeed_launcher  # deepspeed is a requirement of shardvit's
