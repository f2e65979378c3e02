"""Old names of `pipeline.runs.read`, until nothing uses them."""

from pipeline.runs.read import Run as RunHistory
from pipeline.runs.read import RunStage as StageHistory
from pipeline.runs.read import read_run as read_history
from pipeline.runs.read import run_folder_at

__all__ = ["RunHistory", "StageHistory", "read_history", "run_folder_at"]
