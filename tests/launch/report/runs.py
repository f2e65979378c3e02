"""Run folders for the tests: as training leaves them, and hostile ones, without training."""

import json
import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from shardvit.pipeline.pictures.style import keep_picture
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.evaluations import Calibration, Evaluation, Judged, PerClass, save_evaluation
from shardvit.pipeline.runs.logs import EventsLog, MetricsLog
from shardvit.pipeline.runs.pictures import Picture, keep_table
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.transfer.results import TransferRecord, TransferScore, UsedSet, save_record

# Shown anywhere it must be text. What it would run sets window.hit.
HOSTILE = (
    "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'>\"><svg onload=window.hit=3> "
    "javascript:window.hit=4 {{ 7*7 }} $x^2$ \x1b[2J\u202e\u2028\x00 & ' \\"
)
# As an image of its own file it may draw, and nothing else.
HOSTILE_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="80" height="40" onload="window.hit=5"><script>window.hit=6;'
    "parent.hit=7;fetch('http://127.0.0.1:9/')</script><rect width='80' height='40' fill='#0a5fa5'/></svg>"
)


def make_run(root: Path, name: str, *, overrides: tuple[str, ...] = (), points: int = 60, words: str = "") -> RunFolder:
    """A finished run of the recipe digits with curves, events, pictures, evaluations and transfer; `words` stands
    wherever a file has text of its own."""
    folder = RunFolder(root, name)
    folder.open(load_recipe("digits", overrides=[f"name={name}", *overrides]))
    classes = [f"{number}{words}" for number in range(7)]
    for stage, steps in (("pretrain", 800), ("finetune", 50)):
        _make_stage(folder, stage, steps=steps, points=points, classes=classes, words=words)
    folder.update("swap_head", state="done")
    scores = (TransferScore("pets", "knn", "top1", 0.71, (0.71,), {"k": 20}),)
    used = (UsedSet("pets", "a", "b", "x", "y", num_classes=37, train_images=185, eval_images=3669),)
    record = TransferRecord("knn", "pets", "m", "d", "pooled", name, "pretrain", None, 51200, used, scores, None)
    save_record(folder.path / "transfer" / "pets.json", record)
    return folder


def _make_stage(
    folder: RunFolder, stage: StageName, *, steps: int, points: int, classes: list[str], words: str
) -> None:
    model = {"head": "mlp", "num_classes": len(classes), "image_size": 16, "class_names": classes}
    results = {"val/loss": 0.11, "val/top1": 0.98, "val/images": 252.0, "best/step": 600.0, "best/val/top1": 0.99}
    folder.update(
        stage, state="done", images_seen=64 * steps, seconds=41.5, total_steps=steps, results=results, model=model
    )
    own = folder.stage(stage)
    noise = np.random.default_rng(len(folder.name)).normal(size=points)
    with MetricsLog(own / "metrics.jsonl", resume_step=-1) as log:
        for number in range(points):
            step = max(1, round((number + 1) * steps / points))
            metrics = {
                "train/loss": 2 * math.exp(-number / points) + 0.1 * float(noise[number]),
                "opt/lr": 0.002 * (1 - number / points),
                "opt/grad_norm": 1 + float(noise[number]) ** 2,
                "opt/skipped_steps": 0.0,
                "perf/images_per_s": 1200.0 + 10 * number,
                "perf/data_wait_frac": 0.1,
            }
            if words:
                metrics[f"weird{words}"] = float(number)
            log.append(step=step, images_seen=64 * step, metrics=metrics)
            if number % 15 == 14:
                held_out = {"val/loss": 1.5 - number / points, "val/top1": number / points, "val_other/top1": 0.5}
                log.append(step=step, images_seen=64 * step, metrics=held_out)
    with EventsLog(own / "events.jsonl") as events:
        for step, kind in ((0, "start"), (10, "checkpoint"), (20, "spike"), (25, "stopped"), (25, "start")):
            events.append(kind, f"{kind} {words}", step=step, images_seen=64 * step)
        events.append("done", f"done {words}", step=steps, images_seen=64 * steps)
    for step in (steps // 2, steps):
        for group in ("data", "evaluation"):
            figure = Figure(figsize=(4, 2))
            figure.subplots().plot([0, step])
            picture = Picture(f"{group}_picture", f"Title {words}", f"Caption {words}", f"Alt {words}", group)
            keep_picture(own, picture, figure=figure, step=step)
    for name in ("class_scores", "confusion_matrix__other"):  # of which the page leaves out the first
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot([0, 1])
        title = f"Title of {name} {words}, set other"
        keep_picture(own, Picture(name, title, "", f"Alt {words}", "evaluation"), figure=figure, step=steps)
    columns = {f"class {words}": classes, "accuracy": [0.9] * len(classes)}
    keep_table(own, Picture("per_class", f"By class {words}", "", "", "evaluation"), columns=columns, step=steps)
    counts = np.full(len(classes), 36, dtype=np.int64)
    judged = Judged(0, f"key{words}", (1,), 2, 0.9, 0.05, ((2, 0.9), (1, 0.05)))
    evaluation = Evaluation(
        "val",
        tuple(classes),
        "single",
        252,
        {"val/top1": 0.98, "val/top5": 1.0, "val/loss": 0.11},
        PerClass(counts, counts - 1, (counts - 1) / counts),
        np.diag(counts),
        Calibration(np.linspace(0, 1, 16), np.full(15, 0.5), np.full(15, 0.5), np.full(15, 16, dtype=np.int64)),
        (judged,),
        (judged,),
    )
    save_evaluation(own, evaluation, step=steps)


def make_hostile(folder: RunFolder) -> None:
    """What a run folder from elsewhere may hold, on top of a whole one."""
    own = folder.stage("pretrain")
    pictures = own / "pictures"
    for name in ("evil", "torn", "bomb"):
        (pictures / name).mkdir()
        words = {"title": f"{name} {HOSTILE}", "caption": HOSTILE, "alt": HOSTILE, "group": "model", "step": 800}
        (pictures / name / "step-00000800.json").write_text(json.dumps(words))
        (pictures / name / "step-00000800.svg").write_text(HOSTILE_SVG)
        Image.new("RGB", (80, 40), "#0a5fa5").save(pictures / name / "step-00000800.png")
    png = pictures / "torn" / "step-00000800.png"
    png.write_bytes(png.read_bytes()[:60])
    Image.new("1", (12000, 12000)).save(pictures / "bomb" / "step-00000800.png")
    rows = [
        {"step": 1, "images_seen": 64, "time": 1e300, "metrics": {HOSTILE: 1.0, "train/loss": 1e308}},
        {"step": 2, "images_seen": 128, "time": math.nan, "metrics": {HOSTILE: math.inf, "train/loss": -1e308}},
        {"step": 2**62, "images_seen": 2**62, "time": -5, "metrics": {"opt/lr": 5e-324, "train/loss": 1.0}},
    ]
    with (own / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b"\xff{\n")
    with (own / "events.jsonl").open("ab") as file:
        event = {"time": 1e300, "step": 3, "images_seen": 192, "kind": "spike", "text": HOSTILE}
        file.write(json.dumps(event).encode() + b"\n" + b'{"torn')
    (folder.stage("finetune") / "stage.json").write_text(f'"{HOSTILE}"')
    (folder.path / "transfer" / "bad.json").write_text("{" + HOSTILE)
