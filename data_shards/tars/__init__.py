"""Where samples lie in tars: walking headers, indexes, and tars that other tools made."""
