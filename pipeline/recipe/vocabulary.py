"""Shared names: stages, optimizers, metrics, exit codes, files of a run folder. Imports nothing.

A new optimizer is a name and an entry here and a case in `optimizers.optim.optimizer_over`; a new metric is an entry
here and the line that computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

StageName = Literal["masked_patch", "masked_autoencoder", "pretrain", "swap_head", "finetune"]
ALL_STAGES: tuple[StageName, ...] = get_args(StageName)
SinkName = Literal["mlflow", "tensorboard", "wandb"]  # tracking services; NAME.json of the run and each stage: progress

# ---- exit codes of `shardvit`, ranks and launchers ----

EXIT_FAILED = 1
EXIT_USER_ERROR = 2  # the user must act first: a mistake, a full disk, a missing folder
EXIT_STOPPED = 75  # stopped by a signal, after saving. BSD's EX_TEMPFAIL: run the same command again
EXIT_READER_LEFT = 141  # 128 + SIGPIPE: the output's reader ended

# ---- a run folder: RUNS/NAME/... ----

RECIPE_FILE = "recipe.yaml"  # the resolved recipe; each checkpoint has a copy
DIFFERENCE_FILE = "recipe_difference.txt"  # from what it extends, or from the recipe without overrides
STAGE_FILE = "stage.json"  # STAGE/...: state, images seen, digests of inputs, results
DATA_FILE = "data.json"  # the shards at the stage's start
CHECKPOINTS_FOLDER = "checkpoints"
RANKS_FOLDER = "ranks"  # heartbeats and stacks
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"  # of all attempts
CORRUPT_SAMPLES_FILE = "corrupt_samples.jsonl"
MODEL_FOLDER = "model"  # the result: safetensors and config.json
MLFLOW_FILE = "mlflow.json"  # of the run and each stage: its MLflow run, and what was sent
MLFLOW_FACTS_FILE = "mlflow_facts.json"  # STAGE/...: facts for its MLflow run, apart from the metrics
TRACKING_FOLDER = "tracking"  # of the run: environment and code changes, as in MLflow
PAGE_FILE = "report.html"  # the run on one page
PICTURES_FOLDER = "pictures"  # STAGE/...: NAME/step-00000400.png, .svg, .json
PICTURES_LOG = "pictures.log"  # output of the drawing process
COMPILED_FOLDER = "compiled"  # torch.compile's kernels
REPLACED_FOLDER = "replaced"  # stages moved by --restart
SWEEP_FILE = "sweep.json"  # in the folder of a sweep
PROJECTION = "distill_projection"  # a student's module, which checkpoints have and models have not

# ---- optimizers ----

OptimizerName = Literal["adamw", "sgd", "adafactor", "lamb", "muon", "custom"]
MomentType = Literal["float32", "bf16"]
_FLOAT32_BYTES, _BF16_BYTES = 4, 2


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state per parameter, and the recipe keys that belong to the optimizer."""

    moments: tuple[str, ...]  # names in torch's state; shaped like the parameter, float32 except `rounded`
    keys: tuple[str, ...]  # in the recipe's optimizer group; refused by other optimizers
    defaults: Mapping[str, object] = field(default_factory=dict)  # of its keys, where the recipe's differ
    rounded: str | None = None  # the moment that `first_moment: bf16` keeps in bf16
    more_bytes: float = 0.0  # per parameter, at most, on top of the moments
    takes: Literal["pieces", "split", "parameters"] = "pieces"
    """pieces: under every ZeRO stage. split: its law needs whole tensors, which `optimizers.split` joins under ZeRO 1
    and 2. parameters: whole ones only, so no ZeRO 1 to 3."""
    joined_bytes: int = 0  # split: per parameter of a process's piece, for a step
    counts: bool = False  # steps, beside the moments

    def bytes_per_parameter(self, first_moment: MomentType) -> float:
        saved = _FLOAT32_BYTES - _BF16_BYTES if self.rounded and first_moment == "bf16" else 0
        return _FLOAT32_BYTES * len(self.moments) - saved + self.more_bytes


OPTIMIZERS: dict[OptimizerName, OptimizerState] = {
    "adamw": OptimizerState(
        moments=("exp_avg", "exp_avg_sq"), keys=("betas", "eps", "first_moment"), rounded="exp_avg", counts=True
    ),
    "sgd": OptimizerState(moments=("momentum_buffer",), keys=("momentum", "first_moment"), rounded="momentum_buffer"),
    "adafactor": OptimizerState(
        moments=("exp_avg",),
        keys=("momentum", "first_moment"),
        defaults={"first_moment": "bf16"},  # big_vision's
        rounded="exp_avg",
        more_bytes=0.25,  # a row and a column for a matrix of at least 32 x 32
        takes="parameters",
    ),
    "lamb": OptimizerState(
        moments=("exp_avg", "exp_avg_sq"), keys=("betas", "eps"), defaults={"eps": 1e-6}, takes="split", counts=True
    ),
    "muon": OptimizerState(
        moments=("momentum_buffer",),
        keys=("betas", "eps", "momentum"),
        defaults={"momentum": 0.95},  # torch's
        more_bytes=4.0,  # embeddings, head, norms and biases have AdamW's two moments
        takes="split",
        joined_bytes=4,  # sent and received in bf16
    ),
    "custom": OptimizerState(moments=(), keys=("custom",), more_bytes=8.0, takes="parameters"),  # of an unknown state
}

AttentionKernel = Literal["cudnn", "flash", "efficient", "math"]

# ---- trained weights and their moving average (EMA) ----

WeightsKind = Literal["weights", "ema"]
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a parameter in the forward pass, by precision
MASTER_BYTES = 4  # of its float32 master copy
AVERAGE_BYTES = 4  # of its moving average: float32, on top of the moments

# ---- features before the head, for few-shot accuracy, probes and kNN ----

FeatureLayer = Literal["pre_logits", "pooled"]

# ---- evaluation metrics besides loss, top-1, balanced accuracy and the share of the most common class ----

EvalMetric = Literal["top5", "calibration_error", "precision_at_1", "mean_average_precision"]
OWN_SET = "val"  # the stage's own held-out set, in metrics and folders
OF_ONE_LABEL: tuple[EvalMetric, ...] = ("top5", "calibration_error")
OF_SEVERAL_LABELS: tuple[EvalMetric, ...] = ("precision_at_1", "mean_average_precision")

# ---- metrics in metrics.jsonl and MLflow ----


@dataclass(frozen=True)
class Metric:
    """A logged value; `meaning`: a clause without a full stop."""

    unit: str  # "share": of 1; "": it has none
    meaning: str


METRICS: dict[str, Metric] = {
    "train/loss": Metric(
        "nats",
        "mean loss of the steps since the last point, over all ranks; masked autoencoder: mean squared error of the "
        "hidden patches' pixels",
    ),
    "train/top1": Metric("share", "top-1 on augmented images; a mixed image counts by the predicted class's share"),
    "train/accuracy": Metric("share", "masked patch prediction: share of patches with the right colour, as train/loss"),
    "train/teacher_agreement": Metric(
        "share", "distill: share of augmented images with the same top-1 of student and teacher; not of features"
    ),
    "train/epoch": Metric("epochs", "images seen over images of the training set"),
    "opt/lr": Metric("", "learning rate of the last step"),
    "opt/grad_norm": Metric("", "L2 norm of the last step's gradients, before clipping"),
    "opt/parameter_norm": Metric("", "L2 norm of all trained weights (float32 masters) after the last step"),
    "opt/update_ratio": Metric(
        "ratio",
        "L2 norm of the last weight update over opt/parameter_norm; 0: the step was skipped; missing with "
        "engine.offload and if a GPU has no memory for a copy",
    ),
    "opt/loss_scale": Metric("", "fp16: loss scale after the last step"),
    "opt/skipped_steps": Metric("steps", "steps skipped so far because their gradients were not finite"),
    "opt/passed_over_steps": Metric("steps", "steps so far whose batches were skipped after a rollback"),
    "data/substituted_images": Metric("images", "damaged images so far that were replaced by another image"),
    "perf/images_per_s": Metric("images/s", "training images per second over all ranks, without evaluation and saving"),
    "perf/step_seconds_p50": Metric(
        "s", "median step time on rank 0 since the last point, without evaluation and saves"
    ),
    "perf/step_seconds_p95": Metric("s", "95th percentile of the step times since the last point"),
    "perf/step_seconds_max": Metric("s", "longest step time since the last point"),
    "perf/model_tflops_per_s": Metric(
        "TFLOP/s", "model FLOPs per process, forward and backward, without recomputation; with a teacher's forward pass"
    ),
    "perf/mfu": Metric(
        "share",
        "model FLOPs utilisation: perf/model_tflops_per_s over the GPU's dense peak in the recipe's precision, from "
        "its data sheet; missing on CPUs, on GPUs not in pipeline/budget/gpus.py, and with TF32",
    ),
    "perf/gpu_memory_peak_gib": Metric("GiB", "peak memory of rank 0's tensors on its GPU in this stage"),
    "perf/host_memory_peak_gib": Metric("GiB", "peak resident memory of rank 0's process, without data workers"),
    "perf/gpu_hours": Metric("h", "stage hours times GPUs, over all attempts (a killed one up to its last save)"),
    "perf/process_hours": Metric("h", "on CPUs: hours of the stage times its processes, over all attempts"),
    "perf/core_wait_frac": Metric("share", "on CPUs: share of runnable time that rank 0's threads waited for a core"),
    "perf/data_wait_frac": Metric("share", "share of the time behind perf/images_per_s that rank 0 waited for batches"),
    "perf/save_stall_frac": Metric("share", "share of this attempt's time that training waited for checkpoints"),
    "perf/slowest_rank_ratio": Metric("ratio", "own time per step of the slowest rank over that of the median rank"),
    "val/loss": Metric(
        "nats", "mean loss on the held-out set, without label smoothing; masked autoencoder: as train/loss"
    ),
    "val/top1": Metric("share", "top-1 accuracy on the held-out set"),
    "val/balanced_accuracy": Metric("share", "images with one label: mean of the per-class top-1"),
    "val/commonest_class_share": Metric("share", "images in the most common class: val/top1 of always predicting it"),
    "val/accuracy": Metric("share", "masked patch prediction: share of held-out patches whose colour is right"),
    "val/ema_loss": Metric("nats", "val/loss of the moving average of the weights"),
    "val/ema_top1": Metric("share", "val/top1 of the moving average of the weights"),
    "val/ema_balanced_accuracy": Metric("share", "val/balanced_accuracy of the moving average of the weights"),
    "val/ema_accuracy": Metric("share", "val/accuracy of the moving average of the weights"),
    "val/top5": Metric("share", "top-5 accuracy on the held-out set"),
    "val/calibration_error": Metric(
        "share", "gap of confidence and accuracy over 15 confidence bins, weighted by images"
    ),
    "val/precision_at_1": Metric("share", "images with several labels: share whose top class is one of them"),
    "val/mean_average_precision": Metric("share", "images with several labels: average precision, mean over classes"),
    "val/images": Metric("images", "held-out images that could be read"),
    "val/fewshot_NAME_Kshot": Metric(
        "share", "top-1 on set NAME: least squares on K images per class, mean over seeds"
    ),
    "val/probe_NAME_top1": Metric("share", "transfer --method probe: logistic regression on set NAME; also _top5"),
    "val/probe_NAME_loss": Metric("nats", "mean cross-entropy of that probe"),
    "val/knn_NAME_Knn_top1": Metric("share", "transfer --method knn: K nearest neighbours on set NAME; also _top5"),
    "val/transfer_mean": Metric("share", "shardvit transfer: mean of the first top-1 of each data set"),
    "model/parameters": Metric("parameters", "swap_head: parameters of the model"),
    "model/head_parameters_dropped": Metric("parameters", "swap_head: parameters of the dropped head"),
    "model/head_parameters_attached": Metric("parameters", "swap_head: parameters of the new head"),
}
