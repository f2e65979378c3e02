"""Real MLflow in a folder of runs that was moved or copied: what is sent lies beside it, and the original stays."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardvit.pipeline.tracking.client import client_of, open_client, store_uri

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def opened(home: Path) -> tuple[Any, str]:
    """As in another process: MLflow keeps the places of the runs that this one has written to."""
    from mlflow.tracking._tracking_service import utils

    utils._artifact_repos_cache.clear()
    return open_client(store_uri(None, home=home), home=home, experiment="law")


def send(client: Any, run_id: str, text: str) -> None:
    client.log_text(run_id, text, "figures/loss.svg")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder of runs, the run in it, and a model of it, registered."""
    import mlflow

    home = tmp_path_factory.mktemp("made") / "runs"
    home.mkdir()
    client, experiment = opened(home)
    run_id = client.create_run(experiment).info.run_id
    send(client, run_id, "before")
    model = client.create_logged_model(experiment, name="m", source_run_id=run_id)
    weights = tmp_path_factory.mktemp("model")
    (weights / "weights").write_text("w")
    client.log_model_artifacts(model.model_id, str(weights))
    client.create_registered_model("law")
    mlflow.set_tracking_uri(store_uri(None, home=home))  # where MLflow looks for the model, whatever the client's is
    client.create_model_version("law", f"models:/{model.model_id}", model_id=model.model_id)
    mlflow.set_tracking_uri("")
    return home, run_id, model.model_id


def files_of(home: Path) -> dict[str, str]:
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in home.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("how", [["cp", "-r"], ["cp", "-rl"], ["mv"]], ids=" ".join)
def test_what_is_sent_after_a_move_or_copy_lies_beside_it(
    made: tuple[Path, str, str], tmp_path: Path, how: list[str]
) -> None:
    original, run_id, model_id = made
    if how == ["mv"]:  # of a copy that was made by another way
        subprocess.run(["cp", "-r", original, tmp_path / "first"], check=True)
        client_of(store_uri(None, home=tmp_path / "first"), home=tmp_path / "first")
        original = tmp_path / "first"
    before = files_of(original)
    home = tmp_path / "elsewhere, my runs"
    subprocess.run([*how, original, home], check=True)
    client, experiment = opened(home)
    send(client, run_id, "after")
    new = client.create_run(experiment).info.run_id
    send(client, new, "new")
    assert (files_of(original) if original.exists() else {}) == ({} if how == ["mv"] else before)
    for each, text in ((run_id, "after"), (new, "new")):
        assert (home / "mlartifacts" / each / "artifacts/figures/loss.svg").read_text() == text
        assert [file.path for file in client.list_artifacts(each, "figures")] == ["figures/loss.svg"]
    places = [client.get_logged_model(model_id).artifact_location, client.get_model_version_download_uri("law", "1")]
    assert all(place.startswith(f"{home.as_uri()}/mlartifacts/") for place in places)


def test_the_same_folder_by_another_path_is_no_other(made: tuple[Path, str, str], tmp_path: Path) -> None:
    original, run_id, _ = made
    (tmp_path / "link").symlink_to(original)
    client, _ = opened(tmp_path / "link")
    assert client.get_run(run_id).info.artifact_uri.startswith(original.as_uri())


def test_a_database_that_is_not_the_folders_own_is_left_alone(made: tuple[Path, str, str], tmp_path: Path) -> None:
    """Such as one for several folders of runs, named by MLFLOW_TRACKING_URI."""
    original, run_id, _ = made
    client = client_of(store_uri(None, home=original), home=tmp_path)
    assert client.get_run(run_id).info.artifact_uri.startswith(original.as_uri())
