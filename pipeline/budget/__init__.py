"""What a run will need before it is started: memory, time, traffic, disk, reading. Pure arithmetic, no torch."""
