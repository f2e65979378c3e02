"""Mistakes that people make in recipes, each refused in one plain sentence that names the key and says what to give."""

import os
import random
import string
from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe

TEXT = """\
name: mine
model: {width: 16, depth: 1, heads: 2, patch_size: 4}
stages:
  pretrain:
    train: a/train
    eval: a/val
    image_size: 16
    global_batch_size: 8
    duration: 10 steps
    optimizer: {name: adamw, lr: 3e-4}
    augment: {flip: 0}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    return path


def refusal(source: Path | str, *overrides: str) -> str:
    """The sentence of a refusal."""
    with pytest.raises(UserError) as caught:
        load_recipe(str(source), overrides=overrides)
    return plain(str(caught.value))


def plain(text: str) -> str:
    """The text, which must be one line, fit for a screen, in no words of a library or a program."""
    assert text.isprintable() and len(text) < 700, text
    for word in ("valid string", "valid tuple", "input should", "Input should", "regex", "pattern '", "^", "<unicode"):
        assert word not in text, text
    return text


PRETRAIN = "stages.pretrain."
VALUES = [
    # The issue's.
    (f"{PRETRAIN}duration=10", f"{PRETRAIN}duration is 10: give a length with its unit, such as 10 epochs"),
    (f"{PRETRAIN}augment.crop_area=0.5", f"{PRETRAIN}augment.crop_area is 0.5: give two numbers, such as [0.05, 1]"),
    ("name=my run", "name is 'my run': give letters (a to z), digits, '.', '_' and '-'"),
    ("name=my run", "such as my-run"),
    # Lengths and sizes with units.
    (f"{PRETRAIN}duration=10 epoch s", "write it like '400 steps'"),
    (f"{PRETRAIN}duration=", f"{PRETRAIN}duration is empty: give a length"),
    (f"{PRETRAIN}duration=1e300 epochs", "too long"),
    (f"{PRETRAIN}duration=1e999 steps", "too long"),
    (f"{PRETRAIN}duration=-3 epochs", "not a duration"),
    (f"{PRETRAIN}schedule.warmup=500", "such as 500 epochs or 500 steps"),
    (f"{PRETRAIN}save_every=0.1", f"{PRETRAIN}save_every is 0.1"),
    (f"{PRETRAIN}eval_every=[1, 2]", f"{PRETRAIN}eval_every is [1, 2]: give a length"),
    ("data.cache.limit=100", "data.cache.limit is 100: give a size with its unit, such as 100 GB"),
    ("data.cache.limit=lots", "write it like 500 MB"),
    ("data.cache.limit=1e400 GB", "write it like 500 MB"),
    # Numbers.
    ("seed=-1", "seed is -1: give a whole number of at least 0"),
    ("seed=x", "seed is 'x': give a whole number"),
    ("seed=1.5", "seed is 1.5: give a whole number"),
    ("seed=", "seed is empty: give a whole number"),
    (f"seed={10**30}", "give a whole number of at least 0 and below 9,223,372,036,854,775,808"),
    (f"{PRETRAIN}image_size=large", f"{PRETRAIN}image_size is 'large': give a whole number above 0"),
    (
        f"{PRETRAIN}image_size={10**9}",
        f"{PRETRAIN}image_size is 1000000000: give a whole number above 0 and at most 16,",
    ),
    (f"{PRETRAIN}image_size=-16", f"{PRETRAIN}image_size is -16: give a whole number above 0"),
    (f"{PRETRAIN}image_size=true", f"{PRETRAIN}image_size is true: give a whole number"),
    (f"{PRETRAIN}image_size=[16, 16]", f"{PRETRAIN}image_size is [16, 16]: give a whole number"),
    (f"{PRETRAIN}global_batch_size=1e12", f"{PRETRAIN}global_batch_size is 1000000000000.0: give a whole number"),
    (f"{PRETRAIN}global_batch_size={10**15}", f"{PRETRAIN}global_batch_size is {10**15}: give a whole number"),
    (f"{PRETRAIN}optimizer.lr=fast", f"{PRETRAIN}optimizer.lr is 'fast': give a number above 0"),
    (f"{PRETRAIN}optimizer.lr=.nan", f"{PRETRAIN}optimizer.lr is nan: give a number above 0"),
    (f"{PRETRAIN}optimizer.lr=.inf", f"{PRETRAIN}optimizer.lr is inf: give a number above 0"),
    (f"{PRETRAIN}optimizer.lr=1e999", f"{PRETRAIN}optimizer.lr is inf: give a number above 0"),
    (f"{PRETRAIN}optimizer.lr=0,01", f"{PRETRAIN}optimizer.lr is '0,01': give a number"),
    (f"{PRETRAIN}optimizer.lr=true", f"{PRETRAIN}optimizer.lr is true: give a number"),
    (f"{PRETRAIN}label_smoothing=1", f"{PRETRAIN}label_smoothing is 1: give a number of at least 0 and below 1"),
    (f"{PRETRAIN}augment.flip=false", f"{PRETRAIN}augment.flip is false: give a number of at least 0 and at most 1"),
    (f"{PRETRAIN}head_bias=.nan", f"{PRETRAIN}head_bias is nan: give a number"),
    (f"{PRETRAIN}augment.rand_augment.magnitude=99", "rand_augment.magnitude is 99: give a whole number of at least 0"),
    ("engine.collective_timeout_seconds=1e300", "engine.collective_timeout_seconds is 1e+300: give a number above 0"),
    ("processes=many", "processes is 'many': give a whole number of at least 1 and at most 1,000,000, or auto"),
    ("processes=0", "processes is 0: give a whole number of at least 1"),
    ("data.lanes=0", "data.lanes is 0: give a whole number of at least 1 and at most 65,536, or auto"),
    (f"data.lanes={10**9}", "data.lanes is 1000000000"),
    ("data.workers=none", "data.workers is 'none': give a whole number"),
    # Pairs and lists.
    (f"{PRETRAIN}augment.crop_area=[0.5]", f"{PRETRAIN}augment.crop_area is [0.5]: give two numbers"),
    (f"{PRETRAIN}augment.crop_area=[0.1, 0.5, 1]", "crop_area is [0.1, 0.5, 1]: give two numbers"),
    (f"{PRETRAIN}augment.crop_area=[a, 1]", f"{PRETRAIN}augment.crop_area"),
    (f"{PRETRAIN}optimizer.betas=0.9", f"{PRETRAIN}optimizer.betas is 0.9: give two numbers, such as [0.9, 0.999]"),
    (f"{PRETRAIN}optimizer.betas=[0.9, 1.5]", f"{PRETRAIN}optimizer.betas"),
    (f"{PRETRAIN}train=[]", "the list is empty"),
    (f"{PRETRAIN}train=7", f"{PRETRAIN}train is 7: give a folder or URL of shards"),
    (f"{PRETRAIN}train=", "stages.pretrain: train must be given: folders or URLs of shards, or data"),
    (f"{PRETRAIN}eval=[a, b]", f"{PRETRAIN}eval is ['a', 'b']: give a folder or URL of shards"),
    (f"{PRETRAIN}train=[a, {{shard: b}}]", f"unknown key {PRETRAIN}train.1.shard, did you mean shards?"),
    # One of several words.
    ("engine.precision=fp8", "engine.precision is 'fp8': give bf16, fp16 or fp32"),
    ("engine.precision=bf61", "did you mean bf16?"),
    ("engine.precision=16", "engine.precision is 16: give bf16, fp16 or fp32"),
    ("engine.zero_stage=4", "engine.zero_stage is 4: give 0, 1, 2 or 3"),
    ("engine.zero_stage=true", "engine.zero_stage is true: give 0, 1, 2 or 3"),
    ("engine.activation_checkpointing=maybe", "engine.activation_checkpointing is 'maybe': give true or false, or a"),
    ("engine.activation_checkpointing=-1", "engine.activation_checkpointing is -1: give true or false, or a whole"),
    ("engine.activation_checkpointing=999", "engine.activation_checkpointing 999: the model has"),
    (
        f"{PRETRAIN}optimizer.name=adam",
        f"{PRETRAIN}optimizer.name is 'adam': give adamw, sgd, adafactor, lamb, muon or custom (did you mean adamw?)",
    ),
    (f"{PRETRAIN}loss=cross_entropy", f"{PRETRAIN}loss is 'cross_entropy': give softmax, sigmoid or bce"),
    (f"{PRETRAIN}keep_best=top1", "keep_best is 'top1': give loss or score"),
    ("model.pool=mean", "model.pool is 'mean': give cls, gap or map"),
    # Groups.
    ("model=B/16", "model is 'B/16': give a group of keys, such as {variant: B/16}"),
    (f"{PRETRAIN}optimizer=adamw", f"{PRETRAIN}optimizer is 'adamw': give a group of keys, such as {{name: adamw"),
    ("stages=", "stages is empty: give a group of keys"),
    (f"{PRETRAIN}augment=true", f"{PRETRAIN}augment is true: give a group of keys"),
    ("engine=[]", "engine is []: give a group of keys"),
    # Text.
    ("name=2024", "name is 2024: give text, in quotes if it is a number, such as '2024'"),
    ("name=", "name is empty: give text"),
    ("experiment=3", "experiment is 3: give text, in quotes"),
    ("experiment=''", "experiment is '': give text"),
    ("model={variant: 16}", "model.variant is 16: give text, in quotes"),
    ("model={variant: B-16}", "such as 'B/16'"),
    ("model={variant: B/99999999999}", "such as 'B/16'"),
    (f"{PRETRAIN}train=''", f"{PRETRAIN}train"),
    # Sizes of models.
    (f"model.width={10**9}", "model.width is 1000000000: give a whole number above 0 and at most 65,536"),
    (f"model.depth={10**9}", "model.depth is 1000000000: give a whole number above 0 and at most 1,000"),
    (f"model.heads={10**9}", "model.heads is 1000000000"),
    (f"model.mlp_dim={10**12}", "model.mlp_dim is 1000000000000"),
    (f"model.patch_size={10**9}", "model.patch_size is 1000000000"),
    ("model.width=-16", "model.width is -16"),
    ("model.width=.nan", "model.width is nan"),
    ("model.width=.inf", "model.width is inf"),
    ("model.depth=true", "model.depth is true"),
    ("model={width: 65536, depth: 1000, heads: 1, patch_size: 4}", "model: width 65536, depth 1000"),
    ("model={resnet_layers: [3, 4, 9999999]}", "model.resnet_layers"),
    ("model={resnet_layers: 3}", "model.resnet_layers is 3: give a list"),
    ("model={resnet_layers: [1, 1, 1, 1, 1]}", "model.resnet_layers is [1, 1, 1, 1, ...]: give a list"),
    ("model.layer_scale=.inf", "model.layer_scale is inf: give a number above 0"),
    # Keys.
    (f"{PRETRAIN}optimiser={{}}", f"unknown key {PRETRAIN}optimiser, did you mean optimizer?"),
    ("data.{1: 2}=3", "unknown key"),
    ("data={1: 2}", "unknown key data.1"),
    ("data={true: 2}", "unknown key data."),
    ('data={"\\e[31mred": 2}', "unknown key data.\\x1b[31mred"),
]


@pytest.mark.parametrize(("override", "expected"), VALUES)
def test_a_wrong_value_is_named_with_what_to_give(file: Path, override: str, expected: str):
    assert expected in refusal(file, override)


def test_the_overrides_are_blamed_for_what_they_say_alone(file: Path):
    file.write_text(TEXT.replace("flip: 0", "flipp: 0"))
    wrong = f"{file}: unknown key {PRETRAIN}augment.flipp, did you mean flip?"
    assert refusal(file) == refusal(file, "processes=3") == wrong
    both = refusal(file, "processes=3", "seed=-1")
    assert "in the overrides: seed is -1: " in both and wrong in both
    file.write_text(TEXT)
    assert refusal(file, f"{PRETRAIN}image_size=17").startswith(f"{file} with the overrides: {PRETRAIN}image_size: ")


@pytest.mark.parametrize("key", sorted(f"{name}" for name in Recipe.model_fields))
def test_no_kind_of_value_at_any_key_is_answered_in_the_words_of_a_library(file: Path, key: str):
    """Every key of every group gets every kind of value; whatever is refused is refused in plain words."""
    values = [
        "",
        "7",
        "-1",
        "1.5",
        ".nan",
        "true",
        "word",
        "[]",
        "[x, y, z]",
        "{}",
        "{x: 1}",
        "[[1], {a: 2}]",
        "2024-01-01",
    ]
    places = {"data": ["cache."], "engine": [""], "stages": ["pretrain.", "pretrain.augment.", "pretrain.optimizer."]}
    groups = {
        "": [f"{key}"],
        **{
            place: [f"{key}.{place}{name}" for name in _fields(key, place)]
            for place in [*places.get(key, []), *([""] if key in ("data", "engine", "model") else [])]
        },
    }
    for name in dict.fromkeys(name for names in [[key], *groups.values()] for name in names):
        for value in values:
            try:
                load_recipe(str(file), overrides=[f"{name}={value}"])
            except UserError as error:
                plain(str(error))


def _fields(key: str, place: str) -> list[str]:
    from shardvit.pipeline.recipe.data import CacheRecipe, DataConfig
    from shardvit.pipeline.recipe.optimizer import OptimizerConfig
    from shardvit.pipeline.recipe.schema import EngineConfig
    from shardvit.pipeline.recipe.stages.augment import AugmentConfig
    from shardvit.pipeline.recipe.stages.pretraining import PretrainStage

    of = {
        ("data", ""): DataConfig,
        ("data", "cache."): CacheRecipe,
        ("engine", ""): EngineConfig,
        ("model", ""): Recipe.model_fields["model"].annotation,
        ("stages", "pretrain."): PretrainStage,
        ("stages", "pretrain.augment."): AugmentConfig,
        ("stages", "pretrain.optimizer."): OptimizerConfig,
    }
    return list(of[key, place].model_fields)


def test_many_mistakes_do_not_fill_the_screen(file: Path):
    file.write_text(TEXT + "".join(f"key{number}: 1\n" for number in range(100)))
    assert "and 95 more" in refusal(file)


# Names of runs.


@pytest.mark.parametrize("name", ["mlflow.db", "mlartifacts", "MLflow.db", "mlflow.db-wal", ".", "..", ".x"])
def test_a_name_that_is_taken_in_the_folder_of_all_runs_is_refused(file: Path, name: str):
    assert f"name is {name!r}" in refusal(file, f"name={name}")


def test_a_name_may_be_as_long_as_every_file_system_takes(file: Path):
    assert "name has 300 characters: give at most 200" in refusal(file, f"name={'x' * 300}")
    assert load_recipe(str(file), overrides=[f"name={'x' * 200}"]).name == "x" * 200


# Keys and overrides given twice.


def test_an_override_given_twice_is_refused(file: Path):
    assert "override seed is given twice" in refusal(file, "seed=1", "processes=2", "seed=2")
    text = refusal(file, f"{PRETRAIN}augment.flip=0.5", f"{PRETRAIN}augment={{}}")
    assert f"override {PRETRAIN}augment comes after {PRETRAIN}augment.flip" in text
    finer = load_recipe(str(file), overrides=["data={workers: 1}", "data.lanes=2"]).data
    assert (finer.workers, finer.lanes) == (1, 2)


# Names of recipes.


@pytest.mark.parametrize(
    ("given", "meant"),
    [("mine.yml", "mine.yaml"), ("mien.yaml", "mine.yaml"), ("Mine", "mine.yaml"), ("dgits", "digits")],
)
def test_a_misspelt_recipe_is_answered_with_the_one_that_was_meant(
    file: Path, monkeypatch: pytest.MonkeyPatch, given: str, meant: str
):
    monkeypatch.chdir(file.parent)
    assert refusal(given) == f"there is no recipe {given}, did you mean {meant}?"
    monkeypatch.chdir("/")
    if meant == "mine.yaml":
        assert refusal(file.parent / given).endswith(f"did you mean {file}?")


def test_a_recipe_that_is_like_no_other_is_answered_with_the_command_that_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    text = refusal("qqqqqq")
    assert "`shardvit recipes` lists" in text


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a/" * 3000, "\0", "nul\0.yaml", "tty\x1b[31m"])
def test_a_name_that_no_disk_holds_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(file.parent)
    assert "there is no recipe " in refusal(name)


def test_a_folder_is_no_recipe(file: Path, monkeypatch: pytest.MonkeyPatch):
    assert "is a folder, not a recipe" in refusal(file.parent)
    run = file.parent / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(TEXT)
    assert f"such as {run}/recipe.yaml" in refusal(run)


def test_what_is_no_regular_file_is_no_recipe(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in refusal(tmp_path / "pipe")  # and waits for nobody to write


# Files that are no recipes.


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("# nothing yet\n", "is empty"),
        ("just words", "holds no recipe"),
        ("seed: " + "1" * 5000, "line 1 has a number of 5,000 digits"),
        ("seed: 0x" + "f" * 5000, "line 1 has a number of 5,002 digits"),
        ("seed: !!int many", "line 1, column 7: this cannot be read as int"),
        ("seed: !!timestamp soon", "this cannot be read as timestamp"),
        ("seed: !!bool perhaps", "this cannot be read as bool"),
        ("seed: !!python/object/apply:os.getcwd []", "a tag"),
        ("a: " + "[" * 3000, "line 1 opens the 50th group or list within another"),
        ("a: " + "[" * 3000 + "]" * 3000, "line 1 opens the 50th group or list within another"),
        ("a: " * 3000, "a colon is where none can be"),
        (bomb(9), "more than 20,000 values, aliases written out"),
        ("name: &x [*x]", "an alias in line 1 stands inside of what it repeats"),
        ("name: *x", "the alias *x names no anchor"),
        (TEXT.replace("name: mine", "name: mine\nname: other"), "key name is given twice, in lines 1 and 2"),
        (TEXT + "    image_size: 24\n", "key stages.pretrain.image_size is given twice, in lines 7 and 12"),
        (TEXT.replace("depth: 1", "depth: 1, depth: 2"), "key model.depth is given twice, in line 2"),
        (TEXT.replace("  pretrain:", "\tpretrain:"), "line 4, column 1: a tab is where only spaces may be"),
        (TEXT.replace("name: mine", "name: my: run"), "line 1, column 9: a colon is where none can be"),
        (TEXT.replace("name: mine", "name mine"), "line 2, column 6: a colon is where none can be"),
        (TEXT + "x\n", "line 13, column 1: there is no colon behind a key"),
        (TEXT.replace("    eval", "   eval"), "line 6, column 4: it is indented unlike its neighbours"),
        (TEXT + "note: 'unfinished\n", "a quotation mark has no partner"),
        ("model: {width: 16", "a bracket or brace has no partner"),
        (TEXT + "---\n" + TEXT, "line 12, column 1: a second document begins"),
        ("name: a\0b", "character 7 is none that text may have"),
        ('name: "a\\0b"', "line 1 has U+0000"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_the_line(file: Path, text: str, expected: str):
    file.write_text(text)
    said = refusal(file)
    assert said.startswith(str(file)) and expected in said, said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "byte 0 is no UTF-8"),
        ("name: größe".encode("latin-1"), "byte 8 is no UTF-8"),
        (TEXT.encode("utf-16"), "byte 0 is no UTF-8"),
        (b"\0" * 1024, "character 0 is none that text may have"),
        (b"x" * 2**21, "2,097,152 bytes"),
    ],
)
def test_a_binary_file_is_no_recipe(file: Path, content: bytes, expected: str):
    file.write_bytes(content)
    said = refusal(file)
    assert said.startswith(str(file)) and expected in said


def test_random_bytes_are_refused_in_a_sentence(file: Path):
    draw = random.Random(0)
    letters = "{}[]:,-&*!|>%@`\"'#? \n\t~<" + string.ascii_letters[:6] + "123"
    for _ in range(300):
        file.write_text("".join(draw.choice(letters) for _ in range(draw.randrange(60))))
        refusal(file)


def test_a_date_is_text(file: Path):
    """As YAML 1.2 has it; 2024-13-45 is no date that Python could hold."""
    for name in ("2024-01-01", "2024-13-45"):
        assert load_recipe(str(file), overrides=[f"name={name}"]).name == name


def test_a_byte_order_mark_is_passed_over(file: Path):
    file.write_text(TEXT, encoding="utf-8-sig")
    assert load_recipe(str(file)).name == "mine"
