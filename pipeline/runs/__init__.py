"""THE reader of a run folder: stages, attempts, metrics, events, pictures."""
