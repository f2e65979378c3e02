"""`shardvit transfer`: tables, JSON, what is kept and tracked, and mistakes."""

import json
from pathlib import Path

import pytest
import yaml

from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.transfer.results import load_record, transfer_records
from tests.launch.conftest import Call
from tests.pipeline.transfer.small_model import pack_digits, save_small

pytestmark = [  # MLflow's
    pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "FutureWarning", "ResourceWarning")
]

SETS = ("shards/train", "shards/val")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    pack_digits(root / "shards")
    run = RunFolder(root / "runs", "small")
    run.stage("pretrain").mkdir(parents=True)
    save_small(run.model("pretrain"), head="mlp")
    run.update("pretrain", state="done", images_seen=6400)
    (run.path / "recipe.yaml").write_text("name: small\n")
    save_small(root / "model")
    return root


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def cells(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_fewshot_prints_a_table_and_keeps_the_result_with_the_run(call: Call, folder: Path) -> None:
    options = ("--shots", 2, 5, "--seeds", 2, "--no-tracking", "--json", "few.json")
    code, out, err = call("transfer", "runs/small", *SETS, *options, "--method", "fewshot")
    assert code == 0, err
    heading, _, two, five, *_ = cells(out)
    assert (
        heading[:4] == ["shots", "images", "l2", "top-1"] and two[:3] == ["2", "8", "1024"] and five[:2] == ["5", "20"]
    )
    (record,) = transfer_records(folder / "runs" / "small")
    assert (record.run, record.stage, record.step, record.images_seen) == ("small", "pretrain", None, 6400)
    assert (record.command, record.layer) == ("fewshot", "pre_logits")
    assert [f"{each.value:.4f}" for each in record.results] == [two[3], five[3]]
    written = json.loads(Path("few.json").read_text())
    assert written["results"][0]["value"] == record.results[0].value
    assert {name: len(taken) for name, taken in written["shots"]["1"].items()} == dict.fromkeys("0123", 5)
    # the same again, as JSON alone, from what is kept; and into the file that it wrote
    for place in ("-", "few.json"):
        code, out, err = call("transfer", "runs/small", *SETS, *options[:-1], place, "--method", "fewshot")
        assert code == 0 and "features of" not in err
        assert json.loads(out if place == "-" else Path(place).read_text()) == written
    code, _, err = call("transfer", "runs/small", *SETS, "--no-tracking", "--json", "few.json", "--method", "knn")
    assert code == 2 and "few.json" in err and "--force" in err


def test_probe_and_knn_of_a_model_from_elsewhere(call: Call, folder: Path) -> None:
    code, out, err = call(
        "transfer", "model", *SETS, "--c", 0.1, "--no-tracking", "--features", "own", "--method", "probe"
    )
    assert code == 0, err
    assert cells(out)[0] == ["c", "images", "top-1", "loss"]
    code, out, err = call(
        "transfer", "model", *SETS, "--k", 1, 7, "--images", 40, "--no-tracking", "--features", "own", "--method", "knn"
    )
    assert code == 0 and [row[:3] for row in cells(out)[2:4]] == [["1", "0.07", "40"], ["7", "0.07", "40"]]
    kept = [load_record(file) for file in (folder / "own" / "results").glob("*.json")]
    assert {each.command for each in kept} == {"probe", "knn"} and all(each.run is None for each in kept)


def test_results_of_several_sets_of_one_name_stay(call: Call, folder: Path) -> None:
    pack_digits(folder / "other" / "shards", seed=1)
    before = transfer_records(folder / "runs" / "small")
    for sets in (SETS, ("other/shards/train", "other/shards/val"), ("other/shards/train", SETS[1]), SETS):
        assert call("transfer", "runs/small", *sets, "--no-tracking", "--method", "knn")[0] == 0
    files = list((folder / "runs" / "small" / "transfer").glob("knn-shards-*-pretrain.json"))
    assert len(files) == 3
    digests = {(used.train_digest, used.eval_digest) for file in files for used in load_record(file).data_sets}
    assert len(digests) == 3 and {used.name for file in files for used in load_record(file).data_sets} == {"shards"}
    for file in files:  # other tests count what is there
        file.unlink()
    assert transfer_records(folder / "runs" / "small") == before


def test_a_table_goes_on_where_it_was_and_ends_in_mlflow(call: Call, folder: Path) -> None:
    shards = dict(zip(("train", "eval"), SETS, strict=True))
    sets = [
        {"name": "a", "group": "natural", **shards},
        {"name": "b", "group": "structured", "method": "knn", **shards},
    ]
    Path("vtab.yaml").write_text(yaml.safe_dump({"data_sets": sets}))
    code, out, err = call("transfer", "runs/small", "vtab.yaml", "--images", 50)
    assert code == 0, err
    assert "MLflow did not" not in err
    rows = cells(out)[2:]
    assert [row[0] for row in rows] == ["a", "mean", "b", "mean", "mean"] and rows[0][-1] == rows[1][-1]
    code, again, err = call("transfer", "runs/small", "vtab.yaml", "--images", 50, "--no-tracking")
    assert code == 0 and again == out and err.count("done before") == 2
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.data.tags["shardvit.kind"] == "transfer"
    record = load_record(folder / "runs" / "small" / "transfer" / "transfer-vtab-50-pretrain.json")
    assert run.data.metrics["val/transfer_mean"] == record.mean
    assert {"val/probe_a_top1", "val/probe_a_loss", "val/knn_b_20nn_top1"} < set(run.data.metrics)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("transfer", "nowhere", *SETS, "--method", "fewshot"), "nowhere"),
        (("transfer", "model", "shards/none", "shards/val", "--method", "fewshot"), "shards/none"),
        (("transfer", "model", *SETS, "--shots", 0, "--method", "fewshot"), "--shots"),
        (("transfer", "model", *SETS, "--l2", 0, "--method", "fewshot"), "--l2"),
        (("transfer", "model", *SETS, "--l2", 1, 1, "--method", "fewshot"), "--l2"),
        (("transfer", "model", *SETS, "--c", 1, "--hold-out", 0.1, "--method", "probe"), "hold_out"),
        (("transfer", "model", *SETS, "--temperature", 0, "--method", "knn"), "--temperature"),
        (("transfer", "model", *SETS, "--batch-size", 0, "--method", "knn"), "--batch-size"),
        (("transfer", "model", *SETS, "--images", 0, "--method", "knn"), "--images"),
        (("transfer", "model", *SETS, "--label", "cls", "--method", "knn"), "label"),
        (("transfer", "model", *SETS), "--method"),
        (("transfer", "model", *SETS, "--k", 3, "--method", "probe"), "--k"),
        (("transfer", "model", "shards/train"), "EVAL_SHARDS"),
        (("transfer", "model", "nowhere.yaml", "--method", "knn"), "--method"),
        (("transfer", "model", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence(call: Call, arguments: tuple[object, ...], words: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
