"""The `shardvit` command. Heavy libraries are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import errno
import sys

from cyclopts import App, CycloptsError

from data_shards.errors import UserError
from data_shards.working_folder import leave_out
from launch.commands.check import check
from launch.commands.demo import demo
from launch.commands.doctor import doctor
from launch.commands.evaluate import evaluate
from launch.commands.figures import figures
from launch.commands.models import export_model, import_model
from launch.commands.pack import pack
from launch.commands.plan import plan
from launch.commands.predict import predict
from launch.commands.recipes import recipes
from launch.commands.report import compare, report
from launch.commands.run import run, train
from launch.commands.show import show
from launch.commands.slurm import cancel, status, submit
from launch.commands.sweep import sweep
from launch.commands.sync import sync
from launch.commands.table8 import table8
from launch.commands.transfer import fewshot, knn, probe, transfer
from launch.commands.watch import watch
from launch.output import OutputLost, guard, say
from pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_READER_LEFT, EXIT_STOPPED, EXIT_USER_ERROR

app = App(
    name="shardvit",
    help="Pre-train Vision Transformers from WebDataset shards: pretrain, swap head, finetune.",
    help_epilogue="Exit codes: 0 done, 1 failed, or (check, doctor) problems found, 2 something to change (a "
    "mistake, a full disk), 75 stopped by a signal: run the same command again.",
    version="0.1.0.dev0",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() says what an interruption means
)


def main() -> None:
    """Entry point of the console script."""
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
        return app(exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt:  # between two stages, while packing or exporting: files are renamed when they are whole
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


for command in (pack, show, recipes, run, sweep, train, demo, check, plan, submit, status, watch, cancel, doctor):
    app.command(command)
app.command(import_model, name="import")
app.command(export_model, name="export")
app.command(evaluate, name="eval")
for command in (predict, fewshot, probe, knn, transfer, table8, figures, sync, report, compare):
    app.command(command)


if __name__ == "__main__":
    main()
