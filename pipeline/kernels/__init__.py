"""How a stage's arithmetic runs on its device: compiled blocks, attention's kernel and TF32; settled at its start."""
