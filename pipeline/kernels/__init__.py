"""How a stage's arithmetic runs on its device: compiled blocks, attention's kernel, TF32, FP8; settled at its start."""
