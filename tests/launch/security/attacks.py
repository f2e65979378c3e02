"""The table: which command reads which kind of file, what is done to such files, and what becomes of it."""

from dataclasses import dataclass, field
from typing import Literal

from tests.launch.security import on_models as models
from tests.launch.security import on_records as records
from tests.launch.security import on_shards as shards
from tests.launch.security.somebody import Attack

Outcome = Literal["refused", "read as data", "not read", "not run, and said"]


@dataclass(frozen=True)
class Row:
    """One row of the page's table."""

    kind: str  # the file, as the page calls it
    commands: tuple[str, ...]  # that read it
    outcome: Outcome
    attacks: tuple[Attack, ...]  # on such a file, each on its own
    elsewhere: dict[str, str] = field(default_factory=dict)  # commands with a test elsewhere: its file and name


FOLDERS = ("predict", "export")
MODELS = ("predict", "export", "import")
LOOKS = ("run --dry-run", "submit --render", "plan")
RECIPES = ("run", *LOOKS)
RESUME = "tests/distributed/test_elastic.py: test_a_command_in_any_file_of_any_stage_is_refused_by_name_and_not_run"
RESUME_ACCELERATE = (
    "tests/pipeline/engine/saved_state/test_reading.py: test_what_keeps_everything_whole_goes_on_from_no_pickle"
)
REDIRECT = "tests/data_shards/store/test_redirects.py: test_a_redirect_that_is_not_followed_ends_at_once"
OF_HUB = (
    "tests/data_shards/packing/sources/tables/test_hub_tables.py: test_a_data_set_of_a_hub_is_read_without_its_script"
)
SHOWN = "tests/launch/security/test_links.py: test_a_file_that_is_a_link_out_is_not_followed"
SENT = "tests/pipeline/tracking/test_sent_later.py: test_only_files_of_the_run_are_sent_whatever_its_records_name"
DRAWN = "tests/launch/figures/test_figures_command.py: test_weights_that_are_a_link_out_of_the_run_are_not_looked_at"
LINKS = {**dict.fromkeys(("report", "compare", "watch", "status"), SHOWN), "sync": SENT, "figures": DRAWN}

ROWS = (
    Row("a recipe with YAML tags", RECIPES, "refused", (records.tagged_recipe, records.tagged_parent)),
    Row(
        "the recipe in a run's folder",
        FOLDERS,
        "not read",
        (records.tagged_recipe, records.tagged_parent, records.pipe, records.pipe_to_evaluate),
    ),
    Row(
        "a recipe with `pipe:`, or a URL of a kind that may start programs",
        ("run --dry-run", "submit --render"),
        "not run, and said",
        (
            records.pipe,
            records.pipe_to_evaluate,
            records.pipe_behind_a_tar,
            records.pipe_in_braces,
            records.scheme_of_programs,
        ),
    ),
    Row(
        "the same for training images",
        ("plan",),
        "not run, and said",
        (records.pipe, records.pipe_behind_a_tar, records.pipe_in_braces, records.scheme_of_programs),
    ),
    Row(
        "a recipe with a command where it names a file or folder",
        ("run", "run --dry-run", "submit --render"),
        "refused",
        (records.classes_of_a_command, records.model_of_a_command),
    ),
    Row(
        "stage.json, mlflow.json, slurm/*.json",
        ("status", *FOLDERS, "run --dry-run", "submit --render"),
        "read as data",
        (records.commands_in_the_records,),
    ),
    Row(
        "a run's folder: recipe, records, events, evaluations, pictures",
        ("report", "watch", "load_run"),
        "read as data",
        (records.tagged_recipe, records.pipe, records.commands_in_the_records, records.evaluation_of_objects),
    ),
    Row(
        "own code by path in a run or recipe: loss, augmentation, metric, task, callback, optimizer",
        ("report", "watch", "status", "load_run", *FOLDERS, *LOOKS),
        "read as data",
        (records.own_code,),
    ),
    Row(
        "a model of own code in a run",
        ("report", "watch", "status", "load_run"),
        "read as data",
        (records.own_model,),
    ),
    Row("the same", ("predict", "eval", "transfer", "figures", "export"), "refused", (records.own_model,)),
    Row("links out of a run's folder, FIFOs in it", tuple(LINKS), "not read", (), LINKS),
    Row("state.json of a checkpoint", FOLDERS, "refused", (records.command_as_state,)),
    Row(
        "DeepSpeed's checkpoint, ZeRO 0 to 3",
        (*FOLDERS, "run"),
        "refused",
        (*map(records.engine_shards, range(4)), records.raw_pickle_as_shard),
        {"run": RESUME},
    ),
    Row("accelerate's checkpoint", (*FOLDERS, "run"), "refused", (records.accelerate,), {"run": RESUME_ACCELERATE}),
    Row("safetensors", MODELS, "refused", (models.pickle_as_safetensors, models.safetensors_of_pickle)),
    Row(
        "weights of torch (.pt, .pth, .bin, .ckpt, .tar)",
        MODELS,
        "refused",
        (
            *map(models.torch_file, ("w.pt", "w.pth", "w.bin", "w.ckpt")),
            models.old_torch_file,
            models.raw_pickle,
            models.torch_tar,
        ),
    ),
    Row(
        "a model's folder (ours, timm's, transformers')",
        MODELS,
        "refused",
        (models.record_with_code, models.folder_with_code, models.timm_folder_with_code),
    ),
    Row("npz with objects", MODELS, "refused", (models.npz_of_objects, models.npz_of_pickles)),
    Row("torch.export (.pt2)", MODELS, "refused", (models.exported_program,)),
    Row("ONNX with weights outside its folder", MODELS, "refused", (models.onnx_with_weights_elsewhere,)),
    Row(
        "manifest.json that names a command, a URL or a path outside",
        ("check", "run", "run --dry-run", "submit --render"),
        "refused",
        (shards.manifest_pipe, shards.manifest_url, shards.manifest_above),
    ),
    Row(
        "the same manifest.json",
        ("plan",),
        "not run, and said",
        (shards.manifest_pipe, shards.manifest_url, shards.manifest_above),
    ),
    Row(
        "a web server's redirect to `file:`, to a private network, or in a circle",
        ("check",),
        "refused",
        (),
        {"check": REDIRECT},
    ),
    Row("sizes.json, _info.json", ("check", *LOOKS), "read as data", (shards.side_files_of_pipes,)),
    Row("an index (.idx, .npz)", ("check",), "read as data", (shards.index_of_pickle, shards.cached_index_of_objects)),
    Row(
        "tars: `../`, links, pickled members",
        ("check", *LOOKS),
        "read as data",
        (shards.members_above, shards.links, shards.pickled_members),
    ),
    Row(
        "tars of samples: `../`, absolute names, links to images; a `pipe:`",
        ("pack",),
        "refused",
        (
            shards.samples_to_pack("../canary/x.png", "../canary/x.cls"),
            shards.samples_to_pack("/tmp/canary.png"),
            shards.samples_to_pack(links=True),
            shards.samples_of_a_pipe,
        ),
    ),
    Row("an image that is PostScript", ("predict",), "refused", (shards.postscript_image,)),
    Row("the same in shards", ("check",), "refused", (shards.postscript_in_a_tar,)),
    Row("the same to be packed", ("pack",), "refused", (shards.postscript_to_pack,)),
    Row(
        "an npy of objects, or of more values than it has; a TIFF of 2^62 pixels",
        ("predict", "pack"),
        "refused",
        (shards.array_of_objects, shards.giant_array, shards.giant_tiff),
    ),
    Row(
        "pickles among images, as CIFAR's; MATLAB's tables, as Flowers'",
        ("pack",),
        "refused",
        (shards.pickles_to_pack, shards.cifar_of_pickles, shards.cifar_archive_of_pickles, shards.tables_of_pickles),
    ),
    Row(
        "an archive to be packed: `../`, absolute names, images that are links, text",
        ("pack",),
        "refused",
        (shards.archive_above, shards.archive_absolute, shards.archive_of_links, shards.archive_of_text),
    ),
    Row("what was remembered of an archive", ("pack",), "read as data", (shards.listing_of_objects,)),
    Row(
        "parquet, Arrow: pickled or extension columns, `../` paths",
        ("pack",),
        "refused",
        (shards.table_of_extensions, shards.table_of_pickles, shards.table_of_paths),
    ),
    Row("a data set of the hub, with scripts", ("pack",), "read as data", (), {"pack": OF_HUB}),
    Row("CSV, JSONL with paths outside", ("pack",), "refused", tuple(map(shards.labels_outside, ("csv", "jsonl")))),
)
