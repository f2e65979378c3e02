"""`shardvit run`: the stages one after another, on this machine, on hosts or in a SLURM job.

Imported by: commands, files of launch, slurm, sweep.
Imports: data_shards, files of launch, hosts, pipeline, planning.
"""
