"""The flags of `shardvit plan`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import demand_counts


@Parameter(name="*")
@dataclass(frozen=True)
class PlanOptions:
    """Machine and data to plan for, instead of this machine and the shards."""

    gpus: Annotated[
        int | None, Parameter(help="GPUs over all nodes; default: the recipe's processes, or this machine's.")
    ] = None
    gpu: Annotated[str | None, Parameter(help="Their kind, such as h200, a100 or l4; default: this machine's.")] = None
    gpus_per_node: Annotated[int, Parameter(help="GPUs in one machine.")] = 8
    node_gbps: Annotated[
        float | None, Parameter(help="Network of one node in Gbit/s; default: usual for the GPU (h200: 3200).")
    ] = None
    mfu: Annotated[
        float | None, Parameter(help="Share of the peak that training reaches, such as 0.45; default: an anchor.")
    ] = None
    images_per_second: Annotated[
        float | None,
        Parameter(help="Of one GPU, as measured in the first training stage; the others follow by their FLOPs."),
    ] = None
    images: Annotated[
        str | None,
        Parameter(help="Images in the training sets, in place of what the shards say: N, or STAGE=N,STAGE=N."),
    ] = None
    classes: Annotated[str | None, Parameter(help="Their classes: N, or STAGE=N,STAGE=N.")] = None

    def check(self) -> None:
        """UserError if a value is out of range or contradicts another."""
        demand_counts(gpus=self.gpus, gpus_per_node=self.gpus_per_node)
        for flag, number in (("node-gbps", self.node_gbps), ("images-per-second", self.images_per_second)):
            if number is not None and number <= 0:
                raise UserError(f"--{flag}: it is {number:g}; give a number above 0")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise UserError(f"--mfu: it is {self.mfu:g}; give a share of the peak, such as 0.45")
        if self.mfu is not None and self.images_per_second is not None:
            raise UserError("--mfu, --images-per-second: both give the speed; leave one out")
