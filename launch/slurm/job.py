"""What every stage of a run is submitted with: the user's options, completed by the site file. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from data_shards.errors import UserError
from launch.slurm.options import JobOptions, limit_seconds, table
from launch.slurm.site import ContainerSite, Site

_MOST_SIGNAL_SECONDS = 65_535  # SLURM's


@dataclass(frozen=True)
class SlurmJob:
    """What `job_of` made: options without gaps, and the cluster."""

    options: JobOptions
    container: ContainerSite | None = None
    site: Site = field(default_factory=Site)

    @property
    def tasks_per_node(self) -> int:
        """Processes of a node."""
        return self.options.tasks_per_node or self.options.gpus_per_node

    @property
    def processes(self) -> int:
        """Of a training stage, over all nodes."""
        return self.options.nodes * self.tasks_per_node

    @property
    def limit_seconds(self) -> int:
        """Time limit of one job; a stage may take several."""
        return limit_seconds(self.options.time)


def job_of(options: JobOptions, *, site: Site) -> SlurmJob:
    """Check the options and fill their gaps.

    Raises:
        UserError: they contradict themselves.
    """
    options.check()
    if options.gpus_per_node and options.tasks_per_node not in (None, options.gpus_per_node):
        raise UserError(
            f"--tasks-per-node: it is {options.tasks_per_node}, but every GPU has one process: leave it out, or give "
            "--gpus-per-node 0 to train on CPUs"
        )
    if not options.gpus_per_node and options.tasks_per_node is None:
        raise UserError("--gpus-per-node: give the GPUs of a node, or for a cluster without GPUs --tasks-per-node")
    limit = limit_seconds(options.time)
    if options.signal_seconds >= min(limit, _MOST_SIGNAL_SECONDS + 1):
        raise UserError(
            f"--signal-seconds: it is {options.signal_seconds}, and the job has {limit} seconds (--time "
            f"{options.time}): the signal to save must come before the end, and after the start"
        )
    container = site.container
    if options.container is not None:
        container = container.model_copy(update={"image": options.container}) if container else None
        container = container or ContainerSite(image=options.container)
    site_defaults = {
        name: getattr(options, name) or getattr(site.sbatch, name) for name, entry in table().items() if entry.in_site
    }
    tasks_per_node = options.tasks_per_node or options.gpus_per_node
    return SlurmJob(replace(options, tasks_per_node=tasks_per_node, **site_defaults), container=container, site=site)
