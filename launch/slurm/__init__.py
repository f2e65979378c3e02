"""From a recipe to jobs on a SLURM cluster: options, batch scripts, the queue, and whether a job is requeued.

Imported by `cli` and by the batch scripts (`after`). Imports `run`. Only `commands` starts SLURM's programs.
"""
