"""Parts of a stage: data, batches, task, summary."""
