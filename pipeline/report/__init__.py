"""Record and show a stage's progress: metrics.jsonl, events, the progress bar."""
