"""The words that several rooms share: stages, optimizers, metrics, exit codes, and the files of a run folder.

Plain values without imports, so everything may import it. A new optimizer is a name and an entry here and a case in
`optimizers.optim.build_optimizer`; a new metric is an entry here and the line that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
DIFFERENCE_FILE = "recipe_difference.txt"  # to what it extends, or to the recipe without the command's changes
STAGE_FILE = "stage.json"  # STAGE/...: state, images seen, digests of what went in, results
DATA_FILE = "data.json"  # the shards that the stage began with
CHECKPOINTS_FOLDER = "checkpoints"
RANKS_FOLDER = "ranks"  # heartbeats and stacks
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"  # what happened, over all attempts
CORRUPT_SAMPLES_FILE = "corrupt_samples.jsonl"
MODEL_FOLDER = "model"  # the result: safetensors and config.json
MLFLOW_FILE = "mlflow.json"  # of the run, and of each stage: which MLflow run it is, and what of it was sent
MLFLOW_FACTS_FILE = "mlflow_facts.json"  # STAGE/...: what its MLflow run is to know, apart from the metrics
TRACKING_FOLDER = "tracking"  # of the run: environment and changes, as MLflow keeps them
PAGE_FILE = "report.html"  # of the run: everything about it on one page
PICTURES_FOLDER = "pictures"  # STAGE/...: NAME/step-00000400.png, .svg, .json
PICTURES_LOG = "pictures.log"  # what the process that draws them had to say
COMPILED_FOLDER = "compiled"  # what torch has compiled
REPLACED_FOLDER = "replaced"  # what --restart moved aside
SWEEP_FILE = "sweep.json"  # in the folder of a sweep's runs

# ---- optimizers ----

OptimizerName = Literal["adamw", "sgd", "adafactor", "lamb", "muon"]
MomentType = Literal["float32", "bf16"]
_FLOAT32_BYTES, _BF16_BYTES = 4, 2


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state per parameter, and the recipe keys that belong to the optimizer."""

    moments: tuple[str, ...]  # their names in torch's state; each of the parameter's shape, float32 but for `rounded`
    keys: tuple[str, ...]  # of the recipe's optimizer group; refused for the other optimizers
    defaults: Mapping[str, object] = field(default_factory=dict)  # of its keys, where they differ from the recipe's
    rounded: str | None = None  # the moment that `first_moment: bf16` keeps in bf16
    more_bytes: float = 0.0  # of a parameter, at most, beside the moments
    takes: Literal["pieces", "parameters"] = "pieces"  # parameters: whole ones, so that ZeRO 1 to 3 cannot cut them

    def bytes_per_parameter(self, first_moment: MomentType) -> float:
        saved = _FLOAT32_BYTES - _BF16_BYTES if self.rounded and first_moment == "bf16" else 0
        return _FLOAT32_BYTES * len(self.moments) - saved + self.more_bytes


OPTIMIZERS: dict[OptimizerName, OptimizerState] = {
    "adamw": OptimizerState(
        moments=("exp_avg", "exp_avg_sq"), keys=("betas", "eps", "first_moment"), rounded="exp_avg"
    ),
    "sgd": OptimizerState(moments=("momentum_buffer",), keys=("momentum", "first_moment"), rounded="momentum_buffer"),
    "adafactor": OptimizerState(
        moments=("exp_avg",),
        keys=("momentum", "first_moment"),
        defaults={"first_moment": "bf16"},  # big_vision's
        rounded="exp_avg",
        more_bytes=0.25,  # a row and a column in place of a matrix of at least 32 x 32
        takes="parameters",
    ),
    "lamb": OptimizerState(
        moments=("exp_avg", "exp_avg_sq"), keys=("betas", "eps"), defaults={"eps": 1e-6}, takes="parameters"
    ),
    "muon": OptimizerState(
        moments=("momentum_buffer",),
        keys=("betas", "eps", "momentum"),
        defaults={"momentum": 0.95},  # torch's
        more_bytes=4.0,  # embeddings, head, norms and biases have AdamW's two moments
        takes="parameters",
    ),
}

# ---- how products are computed ----

AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]

# ---- the weights that are trained, and their moving average (EMA) ----

WeightsKind = Literal["weights", "ema"]
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a parameter in the forward pass, by precision
MASTER_BYTES = 4  # of its float32 master copy
AVERAGE_BYTES = 4  # of the moving average of a parameter: float32, beside the moments

# ---- features before the head, for few-shot measures and their like ----

FeatureLayer = Literal["pre_logits", "pooled"]

# ---- what an evaluation computes beside loss, top-1, balanced accuracy and the share of the commonest class ----

EvalMetric = Literal["top5", "calibration_error", "precision_at_1", "mean_average_precision"]
OWN_SET = "val"  # the stage's own held-out set, in metrics and folders
OF_ONE_LABEL: tuple[EvalMetric, ...] = ("top5", "calibration_error")
OF_SEVERAL_LABELS: tuple[EvalMetric, ...] = ("precision_at_1", "mean_average_precision")

# ---- metrics: what stands in metrics.jsonl and MLflow ----


@dataclass(frozen=True)
class Metric:
    """A logged value; `meaning`: a clause without a full stop."""

    unit: str  # "share": of 1; "": it has none
    meaning: str


METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats", "mean loss of the steps since the last point, over all ranks"),
    "train/top1": Metric(
        "share",
        "share of training images, as the model saw them, whose best class is right, over the steps of train/loss; a "
        "mixed image counts by the share that this class has in it, and label smoothing does not count",
    ),
    "train/accuracy": Metric(
        "share",
        "masked patch prediction: share of corrupted patches whose colour is right, over the steps of train/loss",
    ),
    "train/epoch": Metric("epochs", "images seen over images of the training set"),
    "opt/lr": Metric("", "learning rate of the last step"),
    "opt/grad_norm": Metric("", "L2 norm of the last step's gradients, before clipping"),
    "opt/parameter_norm": Metric("", "L2 norm of all trained weights (float32 masters) after the last step"),
    "opt/update_ratio": Metric(
        "ratio",
        "L2 norm of what the last step changed in the weights over opt/parameter_norm; 0: it was skipped; left out "
        "with engine.offload, and where a GPU has no memory left for a copy",
    ),
    "opt/loss_scale": Metric("", "fp16: the factor of the loss after the last step"),
    "opt/skipped_steps": Metric("steps", "steps skipped so far because their gradients were not finite"),
    "opt/passed_over_steps": Metric("steps", "steps so far whose batches were passed over after a rollback"),
    "data/substituted_images": Metric("images", "damaged images so far in whose place another one was trained on"),
    "perf/images_per_s": Metric(
        "images/s", "training images per second, all ranks together, without evaluation and saving"
    ),
    "perf/step_seconds_p50": Metric(
        "s", "median of the times of the steps since the last point, by rank 0's clock, without evaluation and saving"
    ),
    "perf/step_seconds_p95": Metric("s", "the time that 95 % of the steps since the last point took at most"),
    "perf/step_seconds_max": Metric("s", "the longest step since the last point"),
    "perf/model_tflops_per_s": Metric(
        "TFLOP/s",
        "what one process computes: images/s over the processes, times the FLOPs that the model needs forward and "
        "backward (recomputation not counted)",
    ),
    "perf/mfu": Metric(
        "share",
        "model FLOPs utilisation: perf/model_tflops_per_s over the GPU's dense peak in the recipe's precision, from "
        "its data sheet; left out on CPUs, on GPUs that are not in pipeline/budget/gpus.py, and with TF32",
    ),
    "perf/gpu_memory_peak_gib": Metric("GiB", "the most memory that tensors of rank 0 took on its GPU in this stage"),
    "perf/host_memory_peak_gib": Metric(
        "GiB", "the most memory that rank 0's process had resident since it began, without data workers"
    ),
    "perf/gpu_hours": Metric(
        "h", "hours of the stage times its GPUs, over all attempts (a killed one up to its last checkpoint)"
    ),
    "perf/process_hours": Metric("h", "on CPUs: hours of the stage times its processes, over all attempts"),
    "perf/core_wait_frac": Metric(
        "share",
        "on CPUs: share of their runnable time that threads of rank 0's process spent waiting for a core",
    ),
    "perf/data_wait_frac": Metric("share", "share of the time of perf/images_per_s in which rank 0 waited for a batch"),
    "perf/save_stall_frac": Metric(
        "share", "share of this attempt's time in which training stood still for checkpoints"
    ),
    "perf/slowest_rank_ratio": Metric("ratio", "the slowest rank's own time per step over the median rank's"),
    "val/loss": Metric("nats", "mean loss of the held-out set, without label smoothing"),
    "val/top1": Metric("share", "share of held-out images whose best class is right"),
    "val/balanced_accuracy": Metric("share", "images with one label: the mean over the classes of each one's top-1"),
    "val/commonest_class_share": Metric(
        "share",
        "share of held-out images that have the commonest class: val/top1 of a model that gives all of them this one",
    ),
    "val/accuracy": Metric("share", "masked patch prediction: share of held-out patches whose colour is right"),
    "val/ema_loss": Metric("nats", "val/loss of the moving average of the weights"),
    "val/ema_top1": Metric("share", "val/top1 of the moving average of the weights"),
    "val/ema_balanced_accuracy": Metric("share", "val/balanced_accuracy of the moving average of the weights"),
    "val/ema_accuracy": Metric("share", "val/accuracy of the moving average of the weights"),
    "val/top5": Metric("share", "share of held-out images whose class is among the five best"),
    "val/calibration_error": Metric(
        "share", "mean distance of confidence and accuracy in 15 bins of confidence, weighted by images"
    ),
    "val/precision_at_1": Metric("share", "images with several labels: share whose best class is one of them"),
    "val/mean_average_precision": Metric(
        "share", "images with several labels: average precision of each class, and the mean over the classes"
    ),
    "val/images": Metric("images", "held-out images that could be read"),
    "val/fewshot_NAME_Kshot": Metric(
        "share", "top-1 on set NAME of least squares on K images of each class, mean over the seeds"
    ),
    "val/probe_NAME_top1": Metric(
        "share", "transfer --method probe: top-1 on set NAME of logistic regression; also _top5"
    ),
    "val/probe_NAME_loss": Metric("nats", "the same: its mean cross-entropy"),
    "val/knn_NAME_Knn_top1": Metric(
        "share", "transfer --method knn: top-1 on set NAME of K nearest neighbours; also _top5"
    ),
    "val/transfer_mean": Metric("share", "shardvit transfer: mean over the data sets of their first top-1"),
    "model/parameters": Metric("parameters", "swap_head: parameters of the model"),
    "model/head_parameters_dropped": Metric("parameters", "swap_head: parameters of the head that was dropped"),
    "model/head_parameters_attached": Metric("parameters", "swap_head: parameters of the head that was attached"),
}
