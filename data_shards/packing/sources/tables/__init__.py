"""Tables as sources: parquet and Arrow files with images or their paths, and labels joined from a table."""
