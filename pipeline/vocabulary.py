"""The words that several rooms share: stages, optimizers, metrics, exit codes, and the files of a run folder.

Plain values without imports, so everything may import it. A new optimizer is a name and an entry here and a case in
`engine.optim.build_optimizer`; a new metric is an entry here and the line that computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

StageName = Literal["masked_patch", "pretrain", "swap_head", "finetune"]
ALL_STAGES: tuple[StageName, ...] = get_args(StageName)

# ---- exit codes, of `shardvit`, of a rank and of every launcher ----

EXIT_FAILED = 1
EXIT_USER_ERROR = 2  # somebody must change something first: a mistake, a full disk, a missing folder
EXIT_STOPPED = 75  # stopped by a signal, after saving. BSD's EX_TEMPFAIL: run the same command again
EXIT_READER_LEFT = 141  # 128 + SIGPIPE: the program that read the output ended

# ---- a run folder: RUNS/NAME/... ----

RECIPE_FILE = "recipe.yaml"  # the resolved recipe; a copy lies in each checkpoint
STAGE_FILE = "stage.json"  # STAGE/...: state, images seen, digests of what went in, results
DATA_FILE = "data.json"  # the shards that the stage began with
CHECKPOINTS_FOLDER = "checkpoints"
RANKS_FOLDER = "ranks"  # heartbeats and stacks
METRICS_FILE = "metrics.jsonl"
CORRUPT_SAMPLES_FILE = "corrupt_samples.jsonl"
MODEL_FOLDER = "model"  # the result: safetensors and config.json
MLFLOW_FILE = "mlflow.json"  # of the run, and of each stage: which MLflow run it is
REPLACED_FOLDER = "replaced"  # what --restart moved aside

# ---- optimizers ----

OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps of each parameter, and which recipe keys are its own."""

    moments: tuple[str, ...]  # their names in torch's state; each float32 and of the parameter's shape
    keys: tuple[str, ...]  # of the recipe's optimizer group; refused for the other optimizers

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * len(self.moments)


OPTIMIZERS: dict[OptimizerName, OptimizerState] = {
    "adamw": OptimizerState(moments=("exp_avg", "exp_avg_sq"), keys=("betas",)),
    "sgd": OptimizerState(moments=("momentum_buffer",), keys=("momentum",)),
}

# ---- metrics: what stands in metrics.jsonl and MLflow ----

METRICS = {
    "train/loss": "mean loss of the steps since the last point, over all ranks",
    "train/epoch": "images seen over images of the training set",
    "opt/lr": "learning rate of the last step",
    "opt/grad_norm": "L2 norm of the last step's gradients, before clipping",
    "opt/skipped_steps": "steps skipped so far because their gradients were not finite",
    "data/substituted_images": "damaged images so far in whose place another one was trained on",
    "perf/images_per_s": "training images per second, all ranks together, without evaluation and saving",
    "perf/data_wait_frac": "share of that time in which rank 0 waited for a batch",
    "perf/save_stall_frac": "share of this attempt's time in which training stood still for checkpoints",
    "perf/slowest_rank_ratio": "the slowest rank's own time per step over the median rank's",
    "val/loss": "mean loss of the held-out set, without label smoothing",
    "val/top1": "share of held-out images whose best class is right",
    "val/accuracy": "masked patch prediction: share of held-out patches whose colour is right",
    "val/images": "held-out images that could be read",
    "model/parameters": "swap_head: parameters of the model",
    "model/head_parameters_dropped": "swap_head: parameters of the head that was dropped",
    "model/head_parameters_attached": "swap_head: parameters of the head that was attached",
}
