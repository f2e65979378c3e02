"""The recipe: its keys, reading it, and the arithmetic that follows from it.

Imported by everything. Imports nothing of `pipeline`, and no torch.
"""
