"""The recipe: its keys, reading it, arithmetic on it. No torch."""
