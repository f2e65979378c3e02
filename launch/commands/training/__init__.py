"""Commands that choose, plan and run training, here or on SLURM."""
