"""What one stage is made of: data, batches, task, description, rollback."""
