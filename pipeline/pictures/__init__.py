"""Draw a stage's data and results as PNG and SVG files in its folder."""
