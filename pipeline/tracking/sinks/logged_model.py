"""Log a stage's result as an MLflow model: an exported torch graph (.pt2) that loads without shardvit.

    mlflow.pyfunc.load_model("models:/ID").predict(pixels)     numpy, uint8 [N, S, S, 3] -> float32 [N, classes]
    mlflow.pytorch.load_model("models:/ID")(pixels)            the same with tensors

Costs one copy of the weights in memory, two on disk and one sent, and some CPU seconds outside the training process.
"""

import json
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardvit.data_shards.safe_paths import require_inside
from shardvit.model.vocabulary import LOSSES
from shardvit.pipeline.recipe.vocabulary import METRICS_FILE, StageName
from shardvit.pipeline.runs.logs import iter_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.sinks.sink import ResultModel

CLASSES_FILE = "classes.json"  # class names in output order, in the model's folder
_MOST_CLASSES = 1000  # named in the metadata
_EXAMPLES = 2  # a batch of one would be exported as a fixed batch size
_REGISTER_SECONDS = 60


def log_result_model(client: Any, *, uri: str, result: ResultModel) -> str:
    """Log a stage's model as an output of its run and the pipeline's, and register it if the recipe says so. Returns
    its id, and the version if registered. Raises whatever torch and MLflow raise."""
    import mlflow
    from mlflow.entities import LoggedModelOutput, Metric

    from shardvit.model.loss import PixelsToProbabilities
    from shardvit.model.saved.model_folder import build_described, load_model

    folder, recipe, stage, run_id = result.folder, result.recipe, result.stage, result.run_id
    require_inside(folder.model(stage), folder=folder.boundary)
    meta, state = load_model(folder.model(stage))
    channels = meta.raw_channels
    model = build_described(meta)
    model.load_state_dict(state)
    model = model.float().requires_grad_(False).eval()
    served = PixelsToProbabilities(
        model, mean=meta.mean, std=meta.std, kind=meta.loss, top=1 if channels else 255
    ).eval()
    run = client.get_run(run_id)
    step = folder.record(stage).total_steps
    facts = {
        "image_size": str(meta.image_size),
        "classes": str(meta.num_classes),
        "output": LOSSES[meta.loss].output,
        "eval_protocol": meta.eval_protocol,
    }
    with tempfile.TemporaryDirectory(prefix="shardvit-model-") as folder_name:
        logged = client.create_logged_model(
            run.info.experiment_id,
            name=f"{recipe.name}-{stage}",
            source_run_id=run_id,
            params=facts,
            tags={"shardvit.stage": stage},
            model_type="classifier",
        )
        path = Path(folder_name) / "model"
        _save(
            served,
            path,
            model_id=logged.model_id,
            run_id=run_id,
            names=meta.class_names,
            facts=facts,
            channels=channels,
        )
        client.log_model_artifacts(logged.model_id, str(path))
    client.finalize_logged_model(logged.model_id, "READY")
    for each in (run_id, result.parent_id):
        client.log_outputs(each, [LoggedModelOutput(logged.model_id, step)])
    last = _last_values(folder, stage=stage)
    points = [Metric(name, value, at, on, model_id=logged.model_id) for name, (value, at, on) in last.items()]
    client.log_batch(run_id, metrics=points, synchronous=True)
    if recipe.tracking.register_as is None:
        return str(logged.model_id)
    mlflow.set_tracking_uri(uri)
    registered = mlflow.register_model(
        f"models:/{logged.model_id}", recipe.tracking.register_as, await_registration_for=_REGISTER_SECONDS
    )
    if recipe.tracking.alias is not None:
        client.set_registered_model_alias(recipe.tracking.register_as, recipe.tracking.alias, registered.version)
    return f"{logged.model_id}, version {registered.version}"


def _save(
    served: Any,
    path: Path,
    *,
    model_id: str,
    run_id: str,
    names: tuple[str, ...],
    facts: dict[str, str],
    channels: int,
) -> None:
    import mlflow.pytorch
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    size = int(facts["image_size"])
    shape, kind = (size, size, channels or 3), np.dtype(np.float32 if channels else np.uint8)
    example = np.zeros((_EXAMPLES, *shape), dtype=kind)
    pixels = "RGB pixels, 0 to 255"
    if channels:
        pixels = f"{channels} channels, integers as shares of their type's range, floats as in the file"
    signature = ModelSignature(
        inputs=Schema([TensorSpec(kind, (-1, *shape), name=None)]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, len(names)))]),
    )
    with warnings.catch_warnings(action="ignore"):  # the exporter warns about its own internals
        mlflow.pytorch.save_model(
            served,
            path,
            mlflow_model=Model(model_id=model_id, run_id=run_id),
            signature=signature,
            input_example=example,
            serialization_format="pt2",
            pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", "torch", "numpy")],
            metadata={
                **facts,
                "input": f"{pixels}, resized to image_size as eval_protocol says",
                "class_names": list(names[:_MOST_CLASSES]),
            },
        )
    (path / CLASSES_FILE).write_text(json.dumps(list(names)) + "\n", encoding="utf-8")


def _last_values(folder: RunFolder, *, stage: StageName) -> dict[str, tuple[float, int, int]]:
    """Return each held-out metric's last value, unix milliseconds and step."""
    return {
        name: (value, int(row.time * 1000), row.step)
        for row in iter_metrics(folder.stage(stage) / METRICS_FILE)
        for name, value in row.metrics.items()
        if name.startswith("val")
    }
