"""Measure what observing a run costs: metrics, events and pictures, in CPU time of rank 0's process.

Run `python -m shardvit.launch.bench.tracking`; output in records/tracking.txt. Calls that only observe (training
accuracy, norms, curve, events, picture requests) are timed by their thread's CPU clock within the same steps, so their
share does not depend on the machine's load. Other threads' CPU time counts as if training had waited for it. Target:
below 1 % of a step, at the default `log_every` of 20 steps. Takes 3 minutes on two idle cores.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from shardvit.launch.bench.measure import children_cpu_seconds, run_json, setting

_TARGET = 0.01
_LOG_STEPS = 20  # the recipe's default
_STEPS, _LOG_EVERY, _EVALUATIONS = 200, 10, 2
_GPU_STEP_SECONDS = 0.25
_LIMIT_SECONDS = 3600
_EACH_STEP = ("training accuracy", "step's clock")
_EACH_POINT = ("norms", "numbers to the host", "point of the curve", "notes and events")
_RECIPE = """
name: tracking
model: {width: 192, depth: 6, heads: 3, patch_size: 4}
data: {workers: 0}
engine: {precision: fp32}
processes: 1
stages:
  pretrain:
    train: SHARDS/train
    eval: SHARDS/val
    image_size: 32
    global_batch_size: 64
    duration: STEPS steps
    log_every: LOG steps
    eval_every: EVAL steps
    optimizer: {name: adamw, lr: 0.001, weight_decay: 0.1, clip_grad_norm: 1.0}
"""


@dataclass
class Costs:
    """CPU seconds of a run's rank 0."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # main thread, by kind of call
    draw_and_send: float = 0.0  # the process that draws and sends
    training: float = 0.0  # whole process, all threads, within the loop
    training_wall: float = 0.0  # elapsed
    steps: int = 0

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] = self.calls.get(name, 0) + 1

    def each(self, name: str) -> float:
        """Seconds per call."""
        return self.seconds.get(name, 0.0) / max(1, self.calls.get(name, 0))

    @property
    def step(self) -> float:
        """Seconds per step, without the calls that only observe."""
        return max(1e-9, self.training - sum(self.seconds.values())) / self.steps

    def of_step(self, name: str, *, log_steps: int) -> float:
        """Seconds per step, with a point every `log_steps` steps."""
        return self.each(name) / (1 if name in _EACH_STEP else log_steps)

    def looking(self, *, log_steps: int) -> float:
        """Seconds per step of all calls that only observe."""
        return sum(self.of_step(name, log_steps=log_steps) for name in (*_EACH_STEP, *_EACH_POINT))


def report(costs: Costs) -> Iterator[str]:
    """Format the table."""
    yield f"\n{costs.steps} steps, a point every {_LOG_EVERY}; CPU time of rank 0's process"
    yield f"{'':34}{'each':>12}{'a step, log_every ' + str(_LOG_STEPS):>24}"
    for name in (*_EACH_STEP, *_EACH_POINT):
        yield f"{name:34}{_ms(costs.each(name)):>12}{_ms(costs.of_step(name, log_steps=_LOG_STEPS)):>24}"
    total = costs.looking(log_steps=_LOG_STEPS)
    yield f"{'together':34}{'':12}{_ms(total):>24}"
    elapsed = costs.training_wall / costs.steps
    yield f"a step itself: {_ms(costs.step)} of CPU ({_ms(elapsed)} elapsed a step: the machine's load)"
    share = total / costs.step
    yield f"share of a step: {share:.2%}, target below {_TARGET:.0%}{'' if share < _TARGET else ': MISSED'}"
    yield f"of a step of {_ms(_GPU_STEP_SECONDS)}, as on a GPU, with the same CPU: {total / _GPU_STEP_SECONDS:.2%}"
    yield f"the process that draws and sends, at a low priority: {costs.draw_and_send:.1f} s for the stage"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="What looking at a run costs the run.")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=_STEPS, help="(%(default)s)")
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    print(f"{setting('torch', 'mlflow')}, no GPU; load average {os.getloadavg()[0]:.1f}")
    print(
        "ViT of width 192 and depth 6 at 32 px (65 tokens), 64 images a step, float32, ZeRO 1, one process", flush=True
    )
    print("\n".join(report(measure(steps=options.steps))))


def measure(*, steps: int) -> Costs:
    """Train on images of digits in a child process."""
    from shardvit.data_shards.packing.pack import pack

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack("digits", folder / "shards", holdout=0.1, report=lambda line: None)
        text = _RECIPE.replace("SHARDS", str(folder / "shards")).replace("STEPS", str(steps))
        text = text.replace("LOG", str(_LOG_EVERY)).replace("EVAL", str(steps // _EVALUATIONS))
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        left_out = ("SHARDVIT_PICTURES", "MLFLOW_TRACKING_URI")
        environment = {key: value for key, value in os.environ.items() if key not in left_out}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = ("--child", str(folder))
        return Costs(
            **run_json("shardvit.launch.bench.tracking", *arguments, env=environment, timeout_seconds=_LIMIT_SECONDS)
        )


def child(folder: Path) -> None:
    """Train as a rank does, with clocks around the calls that only observe."""
    from shardvit.launch import train as rank
    from shardvit.launch.draw_and_send import DrawAndSend
    from shardvit.pipeline.engine.deepspeed_engine import DeepSpeedEngine
    from shardvit.pipeline.engine.weight_norms import WeightNorms
    from shardvit.pipeline.report.reporter import Report
    from shardvit.pipeline.stage.task import Classification
    from shardvit.pipeline.training import stage_training

    costs = Costs()
    training = threading.Event()

    def clocked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                if training.is_set():
                    costs.add(name, time.thread_time() - begun)

        return call

    around = WeightNorms.around

    @contextmanager
    def clocked_around(self: WeightNorms, **more: Any) -> Iterator[None]:
        """Time it without the step inside."""
        before = time.thread_time()
        with around(self, **more):
            inside = time.thread_time()
            yield
            left = time.thread_time()
        costs.add("norms", time.thread_time() - left + inside - before)

    loop = stage_training.train

    def clocked_loop(job: Any, state: Any) -> Any:
        first, begun, wall = state.step, time.process_time(), time.perf_counter()
        training.set()
        try:
            return loop(job, state)
        finally:
            training.clear()
            costs.training, costs.training_wall = time.process_time() - begun, time.perf_counter() - wall
            costs.steps = state.step - first

    close = DrawAndSend.close

    def clocked_close(self: DrawAndSend, **more: Any) -> None:
        before = children_cpu_seconds()
        close(self, **more)
        costs.draw_and_send += children_cpu_seconds() - before

    patches: list[tuple[Any, str, Any]] = [
        (Classification, "train_score", clocked(Classification.train_score, "training accuracy")),
        (Report, "step", clocked(Report.step, "step's clock")),
        (WeightNorms, "around", clocked_around),
        (DeepSpeedEngine, "measured", clocked(DeepSpeedEngine.measured, "numbers to the host")),
        (Report, "curve", clocked(Report.curve, "point of the curve")),
        (Report, "note", clocked(Report.note, "notes and events")),
        (Report, "faults", clocked(Report.faults, "notes and events")),
        (stage_training, "train", clocked_loop),
        (DrawAndSend, "close", clocked_close),
    ]
    for owner, name, replacement in patches:
        mock.patch.object(owner, name, replacement).start()
    code = rank.main([str(folder / "recipe.yaml"), "--stage", "pretrain", "--runs", str(folder / "runs")])
    print(json.dumps(asdict(costs)), flush=True)
    sys.exit(code)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms" if seconds < 0.01 else f"{1000 * seconds:,.1f} ms"


if __name__ == "__main__":
    main()
