"""Engine checkpoints: write the files, and read them at any world size, ZeRO stage and backend."""
