"""Render self-contained HTML pages: reports of runs, figures, shards."""
