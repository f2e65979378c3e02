"""From a recipe to SLURM jobs: options, scripts, the queue, requeueing. Only `commands` starts SLURM's programs.

Imported by: files of launch, watch.
Imports: data_shards, files of launch, pipeline, run, sweep.
"""
