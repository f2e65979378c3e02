"""Recipes as SLURM jobs: options, scripts, the queue, requeueing. Only `commands` starts SLURM's programs."""
