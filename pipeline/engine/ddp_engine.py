"""ZeRO 0: nothing is sharded; torch's DistributedDataParallel averages the gradients while they are computed.

Weights and gradients are in the recipe's precision over float32 masters (`replicated`), so that it computes what ZeRO 1
to 3 compute, in about 20 operations a step where DeepSpeed's stage 0 takes 8,687 for 24 layers. fp16 scales its loss by
torch's GradScaler.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.engine.base import DTYPES
from pipeline.engine.replicated import ReplicatedEngine
from pipeline.engine.saved_state.portable import DDP_FILE
from pipeline.ranks.group import Ranks
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan

_GROWTH_INTERVAL = 1000  # steps after which the loss scale doubles, as DeepSpeed's under ZeRO 1 to 3
_MIB = 1 << 20
_NEVER = 1_000_000_000


class DdpEngine(ReplicatedEngine):
    """See `pipeline.engine.base.Engine`."""

    file, backend = DDP_FILE, "deepspeed"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        dtype = DTYPES[config.precision]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fp16 = config.precision == "fp16"
        scaler = torch.amp.GradScaler(device, growth_interval=_GROWTH_INTERVAL) if fp16 else None

        def wrap(plain: nn.Module) -> nn.Module:
            if ranks.place.world_size == 1:
                return plain
            bucket_mib = config.bucket_elements * dtype.itemsize / _MIB
            ddp = DistributedDataParallel(plain, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
            # It reads its timers in the first ten steps and then at this rate, waiting for the device.
            ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
            return ddp

        super().__init__(model, wrap=wrap, computes_in=dtype, scaler=scaler, stage=stage, plan=plan, ranks=ranks)
