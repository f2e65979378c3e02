"""The table: which command reads which kind of file, what is done to such files, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.launch.security.on_models import (
    exported_program,
    folder_with_code,
    npz_of_objects,
    npz_of_pickles,
    old_torch_file,
    onnx_with_weights_elsewhere,
    pickle_as_safetensors,
    raw_pickle,
    record_with_code,
    safetensors_of_pickle,
    timm_folder_with_code,
    torch_file,
    torch_tar,
)
from tests.launch.security.on_records import (
    accelerate,
    classes_of_a_command,
    command_as_state,
    commands_in_the_records,
    engine_shards,
    evaluation_of_objects,
    model_of_a_command,
    pipe,
    pipe_behind_a_tar,
    pipe_in_braces,
    pipe_to_evaluate,
    raw_pickle_as_shard,
    scheme_of_programs,
    tagged_parent,
    tagged_recipe,
)
from tests.launch.security.on_shards import (
    archive_above,
    archive_absolute,
    archive_of_links,
    archive_of_text,
    cached_index_of_objects,
    cifar_archive_of_pickles,
    cifar_of_pickles,
    index_of_pickle,
    labels_outside,
    links,
    listing_of_objects,
    manifest_above,
    manifest_pipe,
    manifest_url,
    members_above,
    pickled_members,
    pickles_to_pack,
    postscript_image,
    postscript_in_a_tar,
    postscript_to_pack,
    side_files_of_pipes,
    tables_of_pickles,
)
from tests.launch.security.somebody import Attack

Outcome = Literal["refused", "read as data", "not read", "not run, and said"]


@dataclass(frozen=True)
class Row:
    """One row of the page's table.

    Attributes:
        kind: the file, as the page calls it.
        commands: those that read it.
        outcome: what becomes of it there.
        attacks: what is done to such a file, each on its own.
        elsewhere: commands whose test is another one: file and name of it.
    """

    kind: str
    commands: tuple[str, ...]
    outcome: Outcome
    attacks: tuple[Attack, ...]
    elsewhere: dict[str, str] = field(default_factory=dict)


FOLDERS = ("predict", "export")
MODELS = ("predict", "export", "import")
LOOKS = ("run --dry-run", "submit --render", "plan")
RECIPES = ("run", *LOOKS)
RESUME = "tests/distributed/test_elastic.py: test_a_command_in_any_file_of_any_stage_is_refused_by_name_and_not_run"
RESUME_ACCELERATE = (
    "tests/pipeline/engine/saved_state/test_reading.py: test_what_keeps_everything_whole_goes_on_from_no_pickle"
)
REDIRECT = "tests/data_shards/store/test_redirects.py: test_a_redirect_that_is_not_followed_ends_at_once"
SHOWN = "tests/launch/security/test_links.py: test_a_file_that_is_a_link_out_is_not_followed"
SENT = "tests/pipeline/tracking/test_sent_later.py: test_only_files_of_the_run_are_sent_whatever_its_records_name"
DRAWN = "tests/launch/figures/test_figures_command.py: test_weights_that_are_a_link_out_of_the_run_are_not_looked_at"
LINKS = {**dict.fromkeys(("report", "compare", "watch", "status"), SHOWN), "sync": SENT, "figures": DRAWN}

ROWS = (
    Row("a recipe with YAML tags", RECIPES, "refused", (tagged_recipe, tagged_parent)),
    Row("the recipe in a run's folder", FOLDERS, "not read", (tagged_recipe, tagged_parent, pipe, pipe_to_evaluate)),
    Row(
        "a recipe with `pipe:`, or a URL of a kind that may start programs",
        ("run --dry-run", "submit --render"),
        "not run, and said",
        (pipe, pipe_to_evaluate, pipe_behind_a_tar, pipe_in_braces, scheme_of_programs),
    ),
    Row(
        "the same for training images",
        ("plan",),
        "not run, and said",
        (pipe, pipe_behind_a_tar, pipe_in_braces, scheme_of_programs),
    ),
    Row(
        "a recipe with a command where it names a file or folder",
        ("run", "run --dry-run", "submit --render"),
        "refused",
        (classes_of_a_command, model_of_a_command),
    ),
    Row(
        "stage.json, mlflow.json, slurm/*.json",
        ("status", *FOLDERS, "run --dry-run", "submit --render"),
        "read as data",
        (commands_in_the_records,),
    ),
    Row(
        "a run's folder: recipe, records, events, evaluations, pictures",
        ("report", "watch"),
        "read as data",
        (tagged_recipe, pipe, commands_in_the_records, evaluation_of_objects),
    ),
    Row("links out of a run's folder, FIFOs in it", tuple(LINKS), "not read", (), LINKS),
    Row("state.json of a checkpoint", FOLDERS, "refused", (command_as_state,)),
    Row(
        "DeepSpeed's checkpoint, ZeRO 0 to 3",
        (*FOLDERS, "run"),
        "refused",
        (*map(engine_shards, range(4)), raw_pickle_as_shard),
        {"run": RESUME},
    ),
    Row("accelerate's checkpoint", (*FOLDERS, "run"), "refused", (accelerate,), {"run": RESUME_ACCELERATE}),
    Row("safetensors", MODELS, "refused", (pickle_as_safetensors, safetensors_of_pickle)),
    Row(
        "weights of torch (.pt, .pth, .bin, .ckpt, .tar)",
        MODELS,
        "refused",
        (
            *map(torch_file, ("w.pt", "w.pth", "w.bin", "w.ckpt")),
            old_torch_file,
            raw_pickle,
            torch_tar,
        ),
    ),
    Row(
        "a model's folder (ours, timm's, transformers')",
        MODELS,
        "refused",
        (record_with_code, folder_with_code, timm_folder_with_code),
    ),
    Row("npz with objects", MODELS, "refused", (npz_of_objects, npz_of_pickles)),
    Row("torch.export (.pt2)", MODELS, "refused", (exported_program,)),
    Row("ONNX with weights outside its folder", MODELS, "refused", (onnx_with_weights_elsewhere,)),
    Row(
        "manifest.json that names a command, a URL or a path outside",
        ("check", "run", "run --dry-run", "submit --render"),
        "refused",
        (manifest_pipe, manifest_url, manifest_above),
    ),
    Row("the same manifest.json", ("plan",), "not run, and said", (manifest_pipe, manifest_url, manifest_above)),
    Row(
        "a web server's redirect to `file:`, to a private network, or in a circle",
        ("check",),
        "refused",
        (),
        {"check": REDIRECT},
    ),
    Row("sizes.json, _info.json", ("check", *LOOKS), "read as data", (side_files_of_pipes,)),
    Row("an index (.idx, .npz)", ("check",), "read as data", (index_of_pickle, cached_index_of_objects)),
    Row(
        "tars: `../`, links, pickled members",
        ("check", *LOOKS),
        "read as data",
        (members_above, links, pickled_members),
    ),
    Row("an image that is PostScript", ("predict",), "refused", (postscript_image,)),
    Row("the same in shards", ("check",), "refused", (postscript_in_a_tar,)),
    Row("the same to be packed", ("pack",), "refused", (postscript_to_pack,)),
    Row(
        "pickles among images, as CIFAR's",
        ("pack",),
        "refused",
        (pickles_to_pack, cifar_of_pickles, cifar_archive_of_pickles),
    ),
    Row("MATLAB's tables, as Flowers'", ("pack",), "refused", (tables_of_pickles,)),
    Row(
        "an archive to be packed: `../`, absolute names, images that are links, text",
        ("pack",),
        "refused",
        (archive_above, archive_absolute, archive_of_links, archive_of_text),
    ),
    Row("what was remembered of an archive", ("pack",), "read as data", (listing_of_objects,)),
    Row("CSV, JSONL with paths outside", ("pack",), "refused", tuple(map(labels_outside, ("csv", "jsonl")))),
)
