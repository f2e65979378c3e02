"""A saved model: its folder, the shapes of its state, its record next to other files."""
