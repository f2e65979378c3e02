"""From a recipe to jobs on a SLURM cluster: scripts, the queue, and whether a job goes on after it ended."""
