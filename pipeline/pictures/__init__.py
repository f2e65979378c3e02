"""Pictures of a stage, kept as PNG and SVG in its folder: how they look, and those of its data and results."""
