"""The process that `pipeline.beside` starts: it draws beside rank 0, and writes the run's page after each stage."""

import sys

from launch.report.command import write_report
from pipeline.beside import main
from pipeline.report.history import read_history

if __name__ == "__main__":
    main(*sys.argv[1:], write_page=lambda folder: write_report([read_history(folder)]))
