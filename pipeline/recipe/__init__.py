"""The recipe: its keys, reading it, arithmetic on it. Imported by everything; imports no torch and no other room."""
