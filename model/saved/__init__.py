"""A saved model: its folder, the shapes of its state, its record beside other files."""
