"""Classification heads, and dropout with masks by sample."""
