"""Self-contained HTML pages: the report of a run, figures, shards."""
