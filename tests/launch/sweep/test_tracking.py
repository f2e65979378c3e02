"""A sweep's own run in a real MLflow store."""

from pathlib import Path

import pytest

from shardvit.launch.sweep.points import plan_sweep
from shardvit.launch.sweep.record import log_to_mlflow, make_record

LR = "stages.finetune.optimizer.lr"

# MLflow's and SQLAlchemy's own: they are not for us to mend.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "FutureWarning", "ResourceWarning")
]


def test_a_changed_grid_and_share_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from mlflow.tracking import MlflowClient

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    shards = [f"{stage}{key}={key}" for stage in ("", "finetune.") for key in ("train", "eval")]
    for grid, share in (("0.01,0.02", 0.02), ("0.01,0.02,0.03", 0.02), ("0.04,0.05", 0.1)):
        arguments = [*shards, "finetune=cifar10", f"{LR}={grid}"]
        sweep = plan_sweep("vit_b16_in21k", arguments, runs_root=tmp_path / "runs", hold_out=share)
        sweep.root.mkdir(parents=True, exist_ok=True)
        log_to_mlflow(sweep, make_record(sweep, failed={}), status="RUNNING")
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
        (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
        assert (run.data.tags[f"sweep.{LR}"], run.data.tags["sweep.hold_out"]) == (grid, str(share))
    assert "MLflow did not take" not in capsys.readouterr().err
