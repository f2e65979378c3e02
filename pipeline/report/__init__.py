"""Record and show a stage: metrics.jsonl, events, the progress bar."""
