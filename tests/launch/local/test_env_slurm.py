"""Where the tasks of a SLURM step meet."""

import pytest

from launch.local.env import first_host, meeting_port, most_tasks, read_step


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[1-3,7],x", "node1"),
        ("gpu[007-010,12]", "gpu007"),
        ("a,b[1-2]", "a"),
        ("rack[2-3]n[05,08].cluster,z", "rack2n05.cluster"),
        ("n[4]", "n4"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("text", "most"), [("8(x63),4", 8), ("1", 1), ("2,16(x2),4", 16), ("", 0)])
def test_the_most_tasks_of_a_node(text: str, most: int):
    assert most_tasks(text) == most


def test_ports_stay_in_their_range_and_differ_between_neighbouring_jobs_and_their_steps():
    ports = [meeting_port(job=job, step=step) for job in range(1_000_000, 1_000_100) for step in range(16)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20_000 and max(ports) < 30_000


def test_the_jobs_nodes_stand_in_for_the_steps():
    step = read_step(
        {
            **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "3"},
            **{"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[4-5]"},
        }
    )
    assert step is not None and (step.first_host, step.port) == ("n4", 20_147)
