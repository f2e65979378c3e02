"""The process that `pipeline.pictures.draw_process` starts: draws, and writes the run's page after each stage."""

import sys

from launch.pages.sections import write_runs
from pipeline.pictures.draw_process import main
from pipeline.runs.read import read_run

if __name__ == "__main__":
    main(*sys.argv[1:], write_page=lambda folder: write_runs([read_run(folder)]))
