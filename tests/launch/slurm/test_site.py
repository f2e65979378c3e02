"""The site file: what it may say, and that what it may not say is named."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.site import Site, read_site

FULL = """
modules = ["cuda/12.8"]
setup = ["source env/bin/activate"]
python = "python3.12"
srun = ["--cpu-bind=none"]
[sbatch]
partition = "gpu"
lines = ["--exclusive"]
[environment]
NCCL_SOCKET_IFNAME = "ib0"
[container]
image = "a.sqsh"
mounts = ["/data:/data"]
"""


def test_everything_that_it_may_say(tmp_path: Path):
    (tmp_path / "site.toml").write_text(FULL)
    site = read_site(tmp_path / "site.toml")
    assert site.modules == ("cuda/12.8",) and site.sbatch.partition == "gpu" and site.sbatch.lines == ("--exclusive",)
    assert site.environment == {"NCCL_SOCKET_IFNAME": "ib0"}
    assert site.container is not None and site.container.runtime == "pyxis"
    assert read_site(None) == Site()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('module = ["a"]', "unknown key module, did you mean modules?"),
        ('[sbatch]\npartitions = "a"', "unknown key sbatch.partitions, did you mean partition?"),
        ("[container]\nmounts = []", "key container.image is missing"),
        ('[container]\nimage = "a"\nruntime = "docker"', "container.runtime is 'docker': give pyxis or apptainer"),
        ('[environment]\n"A B" = "c"', "'A B' is not a name of an environment variable"),
        ('[sbatch]\nlines = ["exclusive"]', "'exclusive' is not an option"),
        ('python = "a\\nb"', "python: it must be one line"),
        ('[environment]\nA = "b\\nc"', "A must be one line"),
        ("modules = [", "is not valid TOML"),
        ("[environment]\nA = 1", "environment: A must be one line of text, in quotes"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str, named: str):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_site(tmp_path / "site.toml")
    assert named in str(caught.value) and "site.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match=r"--site: .*cannot be read"):
        read_site(tmp_path / "site.toml")
