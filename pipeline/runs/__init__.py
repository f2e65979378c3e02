"""Read and write run folders: stages, metrics, events, evaluations, pictures."""
