"""The table of options: completed by the site file, contradictions refused, times understood."""

from dataclasses import replace
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.job_options import JobOptions, format_limit, limit_seconds, parse_time, table
from shardvit.launch.slurm.site import SbatchSite, Site, job_of

ASKED = JobOptions(nodes=4, time="24:00:00", gpus_per_node=8)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("24:00:00", 86_400),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("2-12:30:05", 217_805),
        ("1", 60),
        ("0:05", 5),
        ("2:00:01", 7201),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int):
    assert limit_seconds(text) == parse_time(text) == seconds
    assert limit_seconds(format_limit(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "0", "0:00:00", "-5", "24h", "1-", "UNLIMITED"])
def test_what_is_no_time_is_refused(text: str):
    with pytest.raises(UserError, match="--time"):
        limit_seconds(text)


def test_every_gpu_has_a_process_and_the_site_completes_the_rest():
    site = Site.model_validate({"sbatch": {"partition": "gpu", "account": "a"}, "container": {"image": "old"}})
    job = job_of(replace(ASKED, account="b", container="new"), site=site)
    assert (job.processes, job.tasks_per_node, job.options.partition, job.options.account) == (32, 8, "gpu", "b")
    assert job.site.container is not None and job.site.container.image == "new"
    assert job_of(JobOptions(nodes=2, time="5", tasks_per_node=3), site=Site()).processes == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nodes": 0}, "--nodes: it is 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node: it is -1"),
        ({"gpus_per_node": 0}, "--gpus-per-node: give the GPUs of a node"),
        ({"tasks_per_node": 4}, "--tasks-per-node: it is 4, but every GPU has one process"),
        ({"cpus_per_task": 0}, "--cpus-per-task: it is 0"),
        ({"signal_seconds": 0}, "--signal-seconds: it is 0"),
        ({"time": "3"}, "--signal-seconds: it is 180, and the job has 180 seconds"),
        ({"signal_seconds": 70_000}, "--signal-seconds: it is 70000"),
        ({"max_restarts": -1}, "--max-restarts: it is -1"),
        ({"partition": "a\nb"}, "--partition: it must be one line"),
        ({"account": ""}, "--account: it must be one line"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], named: str):
    with pytest.raises(UserError) as caught:
        job_of(replace(ASKED, **change), site=Site())
    assert named in str(caught.value)


def test_as_many_processes_as_gpus_may_be_said_aloud():
    assert job_of(replace(ASKED, tasks_per_node=8), site=Site()).processes == 32


def test_flags_and_site_keys_come_from_the_table():
    asked = dict.fromkeys(("partition", "account", "qos", "constraint"), "x")
    job = job_of(replace(ASKED, **asked, cpus_per_task=2), site=Site())
    told = {entry.flag for entry, _ in job.options.flags(stage="pretrain")}
    assert told == {entry.flag for entry in table().values() if entry.flag}
    in_site = {name for name, entry in table().items() if entry.in_site}
    assert in_site == set(asked) and set(SbatchSite.model_fields) == {*in_site, "lines"}
