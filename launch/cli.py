"""The `shardvit` command. Commands import heavy libraries lazily, which keeps `--help` fast."""

import errno
import sys
from collections.abc import Callable

from cyclopts import App, CycloptsError, Group

import shardvit
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.working_folder import leave_out
from shardvit.launch.commands.data.check import check
from shardvit.launch.commands.data.pack import pack
from shardvit.launch.commands.data.show import show
from shardvit.launch.commands.models.convert import export_model, import_model
from shardvit.launch.commands.models.evaluate import evaluate
from shardvit.launch.commands.models.predict import predict
from shardvit.launch.commands.models.push import push
from shardvit.launch.commands.models.transfer import transfer
from shardvit.launch.commands.results.figures import figures
from shardvit.launch.commands.results.report import compare, report
from shardvit.launch.commands.results.sync import sync
from shardvit.launch.commands.results.watch import status, watch
from shardvit.launch.commands.training.demo import demo
from shardvit.launch.commands.training.doctor import doctor
from shardvit.launch.commands.training.plan import plan
from shardvit.launch.commands.training.recipes import recipes
from shardvit.launch.commands.training.run import run, train
from shardvit.launch.commands.training.submit import cancel, submit
from shardvit.launch.commands.training.sweep import sweep
from shardvit.launch.local.output import OutputLost, guard, say
from shardvit.pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_READER_LEFT, EXIT_STOPPED, EXIT_USER_ERROR
from shardvit.pipeline.runs.written_by import revision

app = App(
    name="shardvit",
    help="Pre-train Vision Transformers from WebDataset shards: pretrain, swap head, finetune.",
    help_epilogue="Exit codes: 0 done; 1 failed, or (check, doctor) problems found; 2 a mistake or full disk; "
    "75 stopped by a signal: run it again.",
    version=lambda: f"{shardvit.__version__} (commit {revision()})",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `_run_command` handles it
)

_GONE_COMMANDS = {  # removed command -> what to type instead
    **{n: f"`shardvit transfer MODEL TRAIN_SHARDS EVAL_SHARDS --method {n}`" for n in ("fewshot", "probe", "knn")},
    "table8": "`shardvit sweep digits_positions model.position=none,learned_1d,learned_2d,relative,sincos_2d "
    "--hold-out 30%` (docs/recipes.md)",
}
_GONE_FLAGS = {  # (command, removed flag) -> what to do instead
    ("run", "--launcher"): "hosts are reached over ssh: leave it out",
    ("doctor", "--cache"): "the cache's disk is checked when shards are downloaded: leave it out",
}


def main() -> None:
    """Run the console script."""
    leave_out()
    guard()
    try:
        code = _run_command()
        sys.stdout.flush()
    except OutputLost as error:
        if error.why:
            print(f"shardvit: {error}", file=sys.stderr)
        code = EXIT_FAILED if error.why else EXIT_READER_LEFT
    sys.exit(code)


def _run_command() -> int:
    try:
        _refuse_former(*sys.argv[1:])
        return app(exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt:  # between stages, while packing or exporting: files are renamed when complete
        print("\nshardvit: interrupted: nothing is broken, type the same command again", file=sys.stderr)
        return EXIT_STOPPED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        say(f"{name[:100]}... ({len(name):,} characters) is too long for a path")
        return EXIT_USER_ERROR
    except (UserError, CycloptsError) as error:
        print(f"shardvit: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except OutputLost:
        raise
    except Exception as error:  # noqa: BLE001 - the last stop
        from shardvit.pipeline.own_code.by_path import own_traceback

        print(own_traceback(error), end="", file=sys.stderr)
        return EXIT_FAILED


def _refuse_former(command: str = "", *words: str) -> None:
    if command in _GONE_COMMANDS:
        raise UserError(f"{command} is no longer a command: give {_GONE_COMMANDS[command]}")
    for (of_command, flag), remedy in _GONE_FLAGS.items():
        if command == of_command and any(word.partition("=")[0] == flag for word in words):
            raise UserError(f"{flag} is no longer a flag of {command}: {remedy}")


COMMANDS: dict[str, dict[str, Callable[..., int | None]]] = {
    "Shards": {"pack": pack, "show": show, "check": check},
    "Training": {"demo": demo, "doctor": doctor, "recipes": recipes, "plan": plan, "run": run, "train": train}
    | {"sweep": sweep, "submit": submit, "cancel": cancel},
    "Runs": {"watch": watch, "status": status, "report": report, "compare": compare, "figures": figures, "sync": sync},
    "Models": {"eval": evaluate, "predict": predict, "transfer": transfer}
    | {"import": import_model, "export": export_model, "push": push},
}
for order, (title, commands) in enumerate(COMMANDS.items()):
    group = Group(title, sort_key=order)
    for place, (name, command) in enumerate(commands.items()):
        app.command(command, name=name, group=group, sort_key=place)


if __name__ == "__main__":
    main()
