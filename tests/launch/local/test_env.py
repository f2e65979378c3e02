"""Which process this is, told from each launcher's names; what contradicts itself is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.env import (
    experiment_name,
    first_host,
    job_tags,
    meeting_port,
    num_gpus,
    read_place,
    read_step,
    says_mistakes,
    supervisor_pid,
    time_limit,
    tracking_uri,
    without_place,
)
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import TimeLimit

ADDRESS = {"MASTER_ADDR": "node7", "MASTER_PORT": "29501"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **ADDRESS}
DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", **ADDRESS}
BATCH = {  # what a batch script has, as seen on SLURM 22.05
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
SLURM = {
    **BATCH,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[7-8]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    **ADDRESS,
}
PLACE = Place(rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="node7", master_port=29501)


@pytest.mark.parametrize(("text", "most"), [("8(x63),4", 8), ("4", 4), ("4,16(x2),4", 16), ("", 8)])
def test_slurms_tasks_of_each_node_are_the_steps(text: str, most: int):
    assert read_place({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text}).local_world_size == most


@pytest.mark.parametrize(
    "environ",
    [
        *({}, BATCH, {**BATCH, **ADDRESS}, {"SLURM_JOB_ID": "7"}, {"SLURM_NTASKS": "4"}),
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**ADDRESS, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    ],
)
def test_one_process_has_nobody_to_meet(environ: dict[str, str]):
    assert read_place(environ) == Place() and Place().is_main


def test_srun_alone_names_the_meeting_place():
    bare = {key: value for key, value in SLURM.items() if key not in ADDRESS}
    met = Place(5, 8, local_rank=1, local_world_size=4, master_addr="node7", master_port=21232, log="of the run")
    assert read_place(bare) == met
    assert read_place({**bare, "MASTER_ADDR": "head"}).master_addr == "head"
    assert read_place({**bare, "MASTER_PORT": "7"}).master_port == 7


def test_sruns_numbers_come_before_a_rank_that_a_batch_script_exported():
    assert read_place({**SLURM, "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}) == replace(PLACE, log="of the run")


def test_a_task_that_sees_one_gpu_uses_that_one():
    assert read_place(SLURM, gpus=1).gpu == 0
    assert read_place(SLURM, gpus=4).gpu is None and read_place(SLURM, gpus=0).gpu is None
    assert read_place(TORCHRUN, gpus=1).gpu is None


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, True),
        (SLURM, False),
        ({**SLURM, "RANK": "0"}, False),
        ({**SLURM, "SLURM_PROCID": "0"}, True),
        (BATCH, True),
        (TORCHRUN, False),
        ({**TORCHRUN, "RANK": "0"}, True),
        ({**SLURM, **TORCHRUN, "RANK": "0"}, True),
    ],
)
def test_one_process_says_what_all_find_wrong(environ: dict[str, str], says: bool):
    assert says_mistakes(environ) is says


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SLURM], ids=["torchrun", "deepspeed", "slurm"])
def test_every_launcher_says_the_same(environ: dict[str, str]):
    assert replace(read_place(environ), log=PLACE.log) == PLACE
    assert not PLACE.is_main


@pytest.mark.parametrize(
    ("environ", "is_one"),
    [
        *((TORCHRUN, False), (DEEPSPEED, False), ({**BATCH, **TORCHRUN}, False)),
        *((SLURM, True), ({**SLURM, **TORCHRUN}, True), ({**DEEPSPEED, "SHARDVIT_RUN_ON_HOSTS": "/runs/a"}, True)),
    ],
)
def test_where_all_hosts_write_to_one_log(environ: dict[str, str], is_one: bool):
    assert (read_place(environ).log == "of the run") == is_one


def test_the_folder_of_shardvit_run_comes_before_a_launchers_port():
    met = read_place({**DEEPSPEED, "SHARDVIT_RENDEZVOUS": "/runs/a/.rendezvous-x"})
    assert met == Place(5, 8, local_rank=1, local_world_size=4, rendezvous=Path("/runs/a/.rendezvous-x"))
    without_port = {key: value for key, value in TORCHRUN.items() if key not in ADDRESS}
    assert read_place({**without_port, "SHARDVIT_RENDEZVOUS": "/x"}).rendezvous == Path("/x")
    assert read_place({**TORCHRUN, "SHARDVIT_RENDEZVOUS": ""}) == PLACE


def test_nothing_of_a_launcher_or_an_outer_run_is_passed_on():
    around = {**TORCHRUN, **SLURM, "SHARDVIT_RENDEZVOUS": "/x", "HOME": "/root"}
    assert read_place(without_place(around)).world_size == 1 and without_place(around)["HOME"] == "/root"


def test_what_is_not_said_of_the_node_is_assumed_to_be_one_node():
    environ = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    assert read_place(environ).local_world_size == 8


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (TORCHRUN, {"RANK": None}, "RANK is missing"),
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is missing"),
        (TORCHRUN, {"RANK": "first"}, "RANK is first"),
        (TORCHRUN, {"RANK": "-1"}, "RANK is -1"),
        (TORCHRUN, {"RANK": "8"}, "RANK 8 is not below WORLD_SIZE 8"),
        (TORCHRUN, {"WORLD_SIZE": "0", "RANK": "0"}, "RANK 0 is not below WORLD_SIZE 0"),
        (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN, {"MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN, {"MASTER_PORT": "http"}, "MASTER_ADDR and MASTER_PORT"),
        (SLURM, {"SLURM_LOCALID": None}, "SLURM_LOCALID is missing"),
        (SLURM, {"SLURM_PROCID": "8"}, "SLURM_PROCID 8 is not below"),
        (SLURM, {"MASTER_PORT": "http"}, "MASTER_ADDR and MASTER_PORT"),
        (SLURM, {"WORLD_SIZE": "16"}, "WORLD_SIZE is 16, but srun started 8 tasks"),
        (BATCH, {"WORLD_SIZE": "8"}, "RANK is missing"),
    ],
)
def test_contradictions_and_gaps_are_named(base: dict[str, str], change: dict[str, str | None], named: str):
    environ = {key: value for key, value in {**base, **change}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        read_place(environ)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_tasks_that_would_share_gpus_are_refused():
    with pytest.raises(UserError, match="started 4 tasks on a node, which see 2 GPUs: give --ntasks-per-node 2"):
        read_place(SLURM, gpus=2)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1, 0", 2), ("GPU-8932f937,", 1)]
)
def test_gpus_are_counted_without_a_driver(tmp_path: Path, visible: str | None, count: int):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps", "tty0"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environ, devices=tmp_path) == count


def test_a_machine_without_a_gpu_has_none_whatever_the_environment_says(tmp_path: Path):
    assert num_gpus({}, devices=tmp_path) == 0
    assert num_gpus({}, devices=tmp_path / "nowhere") == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, devices=tmp_path) == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, devices=tmp_path) == 0  # Slurm's word for none


def test_tracking_and_tags():
    assert tracking_uri({}) is None and tracking_uri({"MLFLOW_TRACKING_URI": ""}) is None
    assert tracking_uri({"MLFLOW_TRACKING_URI": "http://a:5000"}) == "http://a:5000"
    for uri in ("sqlite:///a.db", "databricks", "databricks://a", "uc:http://a", "postgresql+psycopg2://me:secret@a/b"):
        assert tracking_uri({"MLFLOW_TRACKING_URI": uri}) == uri
    assert experiment_name({}) is None and experiment_name({"MLFLOW_EXPERIMENT_NAME": "x"}) == "x"
    tags = job_tags({"SLURM_JOB_ID": "77", "MLFLOW_TRACKING_PASSWORD": "secret"})
    assert tags["shardvit.slurm_job_id"] == "77" and "secret" not in "".join(tags.values())
    assert all(tags.values())
    assert "shardvit.slurm_job_id" not in job_tags({})


@pytest.mark.parametrize("uri", ["http//a", "http:/a", "localhost:5000", "runs", "/data/mlruns", "http//me:secret@a"])
def test_what_mlflow_would_take_for_a_folder_is_refused(uri: str):
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI") as refused:
        tracking_uri({"MLFLOW_TRACKING_URI": uri})
    assert "secret" not in str(refused.value)
    assert tracking_uri({"MLFLOW_TRACKING_URI": uri}, form="any") == uri  # the doctor says what is wrong with it


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({}, None),
        ({"SLURM_JOB_END_TIME": "5000", "SLURM_JOB_START_TIME": "1000"}, TimeLimit(5000.0, 4000)),
        ({"SLURM_JOB_END_TIME": "5000"}, TimeLimit(5000.0, 3000)),  # counted from now
        ({"SLURM_JOB_END_TIME": "5000", "SLURM_JOB_START_TIME": "6000"}, TimeLimit(5000.0, 3000)),
        ({"SLURM_JOB_END_TIME": "1999", "SLURM_JOB_START_TIME": "1000"}, None),  # it is over
        ({"SLURM_JOB_END_TIME": "4294967294", "SLURM_JOB_START_TIME": "1000"}, None),  # SLURM's infinity
        ({"SLURM_JOB_END_TIME": "soon"}, None),
    ],
)
def test_the_time_limit_of_a_job(environ: dict[str, str], limit: TimeLimit | None):
    assert time_limit(environ, now=2000.0) == limit


def test_the_supervisor():
    assert supervisor_pid({}) is None and supervisor_pid({"SHARDVIT_SUPERVISOR_PID": "x"}) is None
    assert supervisor_pid({"SHARDVIT_SUPERVISOR_PID": "17"}) == 17


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
