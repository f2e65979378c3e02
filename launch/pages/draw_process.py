"""The process that `pipeline.pictures.draw_process` starts: draws, and writes the run's page after each stage."""

import sys

from launch.commands.results.report import write_report
from pipeline.pictures.draw_process import main
from pipeline.runs.history import read_history

if __name__ == "__main__":
    main(*sys.argv[1:], write_page=lambda folder: write_report([read_history(folder)]))
